"""Calls of the user's own ``torch.autograd.Function``, whose Python runs on a stage alone.

What its forward draws of torch's random numbers is counted when its result is inferred, so that each draw has the
number that it has in one process. What else only one stage would do is refused, as far as it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_pipeline import _torch
from lightning_pipeline.partition.torch_functions import FunctionKind, is_drawing_of_own, kind_of
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.recording.compiled_calls import SeededDraws, python_generators, set_python_generators
from lightning_pipeline.recording.inference import Result

APPLY = vars(_torch.FunctionBase)["apply"]
"""The C++ `apply` of all functions."""


class _Counted(TorchFunctionMode):
    """Counts draws."""

    number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += kind_of(func) is FunctionKind.DRAWS and not is_drawing_of_own(kwargs or {})
        return func(*args, **(kwargs or {}))


class _Refused(TorchFunctionMode):
    """Refuses draws."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind_of(func) is FunctionKind.DRAWS and not is_drawing_of_own(kwargs or {}):
            raise NotImplementedError(
                f"{self._name}.backward draws random numbers, which stages would draw in another order "
                f"({users_line()}): draw them in forward, and keep them by ctx.save_for_backward"
            )
        return func(*args, **(kwargs or {}))


def applying(cls: Any) -> Callable[..., Any]:
    """A function that calls ``cls.apply``, as an event has it."""
    apply = APPLY.__get__(None, _guarded(cls))

    def function(*args: Any, **kwargs: Any) -> Any:
        before = dict(vars(cls))
        found = apply(*args, **kwargs)
        _check_left_alone(cls, before, "forward")
        return found

    def seeded(seed: Callable[[int], None], first: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with SeededDraws(seed, first):
                return function(*args, **kwargs)

        return call

    function.__name__ = f"{cls.__name__}.apply"
    function.applies = cls  # type: ignore[attr-defined]
    function.seeded = seeded  # type: ignore[attr-defined]
    return function


def _guarded(cls: Any) -> Any:
    """The same function with a backward that refuses draws; torch's own stay as they are."""
    backward = cls.backward
    if backward is torch.autograd.Function.backward or cls.__module__.startswith("torch."):
        return cls

    def checked(ctx: Any, *gradients: Any) -> Any:
        before = dict(vars(cls))
        with _Refused(cls.__name__):
            found = backward(ctx, *gradients)
        _check_left_alone(cls, before, "backward")
        return found

    return type(cls.__name__, (cls,), {"backward": staticmethod(checked), "__module__": cls.__module__})


def inferred(cls: Any, infer: Callable[[], Result | None]) -> tuple[Result | None, int]:
    """What `infer` gives, which runs the forward of a function of the user's, and how often that draws.

    Raises:
        NotImplementedError: it does more than that.
    """
    before = dict(vars(cls))
    found, num_draws, is_drawn = _infer_counted(infer)
    if is_drawn:  # perhaps by a module that was imported just now, which it is once
        found, num_draws, is_drawn = _infer_counted(infer)
    if is_drawn:
        raise _done_by_one_stage(cls, "forward", "draws from Python's or numpy's generator")
    _check_left_alone(cls, before, "forward")
    return found, num_draws


def _infer_counted(infer: Callable[[], Result | None]) -> tuple[Result | None, int, bool]:
    """What `infer` gives, its number of draws of torch's, and whether it draws from Python's or numpy's generator."""
    generators = python_generators()
    with _Counted() as counted:
        found = infer()
    is_drawn = python_generators() != generators
    set_python_generators(generators)
    return found, counted.number, is_drawn


def _check_left_alone(cls: Any, before: dict[str, Any], method: str) -> None:
    """Refuse a method that sets an attribute of its class, but for torch's own, which compile themselves."""
    if cls.__module__.startswith("torch."):
        return
    now = vars(cls)
    if len(now) != len(before) or any(value is not before.get(name) for name, value in now.items()):
        name = next(name for name, value in now.items() if value is not before.get(name))
        raise _done_by_one_stage(cls, method, f"sets {cls.__name__}.{name}")


def _done_by_one_stage(cls: Any, method: str, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{cls.__name__}.{method} {what}, which the stage that computes it would do alone ({users_line()}): do it in "
        f"the step, and pass what it gives as an argument"
    )
