"""Calls of the user's own ``torch.autograd.Function``, whose Python runs on a stage alone.

What its forward draws of torch's random numbers is counted when its result is inferred, so that each draw has the
number that it has in one process. What else only one stage would do is refused, as far as it shows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline import _torch
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.rng import python_states, set_python_states
from lightning_pipeline.partition.torch_functions import FunctionKind, is_drawing_of_own, kind_of
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.compiled_calls import SeededDraws
from lightning_pipeline.recording.function_state import Use, objects_in, use_of
from lightning_pipeline.recording.inference import CallError, Result
from lightning_pipeline.recording.operation import Call
from lightning_pipeline.recording.reachable_state import Places

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
    """A function that calls ``cls.apply``, as an event has it.

    What the class uses of Python when a step calls it comes last (`Use`), if it uses anything.
    """
    guarded = _guarded(cls)
    apply = APPLY.__get__(None, guarded)

    def function(*args: Any, **kwargs: Any) -> Any:
        before = dict(vars(cls))
        use = args[-1] if args and type(args[-1]) is Use else None
        found = apply(*args, **kwargs) if use is None else _applied_with(use, cls, guarded, apply, args[:-1], kwargs)
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


def are_hooked_by_module(function: Any, args: Any) -> bool:
    """Whether an `applying` function puts a module's backward hooks on tensors."""
    is_hooking = getattr(function, "applies", None) is _torch.BackwardHookFunction
    return is_hooking and any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)


def with_use(function: Any, args: Any, known: OrderedDict[Any, Places]) -> Any:
    """The arguments of an `applying` function, and what it uses of Python now."""
    cls = getattr(function, "applies", None)
    use = None if cls is None or cls.__module__.startswith("torch.") else use_of(known, cls, args)
    return args if use is None else (*args, use)


def _applied_with(use: Use, cls: Any, guarded: Any, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a function gives, whose backward finds the same state as its forward."""
    objects = objects_in(args)
    _check_unchanged(cls, use, objects)
    outer, guarded.expected = guarded.expected, (use, objects)
    try:
        found = apply(*args, **kwargs)
    finally:
        guarded.expected = outer
    if (name := use.changed(objects)) is not None:
        raise _done_by_one_stage(cls, "forward", f"changes {name}")
    return found


def _guarded(cls: Any) -> Any:
    """The same function with a backward that refuses draws, and changes of Python's state; torch's own stay as they
    are."""
    backward = cls.backward
    if backward is torch.autograd.Function.backward or cls.__module__.startswith("torch."):
        return cls

    def checked(ctx: Any, *gradients: Any) -> Any:
        before, parameters = dict(vars(cls)), getattr(ctx, _GIVEN, ())
        gradients_before = [_gradient(parameter) for parameter in parameters]
        use, objects = getattr(ctx, _EXPECTED, (None, ()))
        if use is not None:
            _check_unchanged(cls, use, objects)
        with _Refused(cls.__name__):
            found = backward(ctx, *gradients)
        _check_left_alone(cls, before, "backward")
        if [_gradient(parameter) for parameter in parameters] != gradients_before:
            raise CallError(
                f"{cls.__name__}.backward gives parameters their gradients itself, which the stages that hold them "
                f"would not know ({backward.__code__.co_filename}:{backward.__code__.co_firstlineno}): give apply the "
                f"parameters as arguments and return their gradients, as torch.autograd.grad has them; "
                f"torch.utils.checkpoint recomputes layers"
            )
        if use is not None and (name := use.changed(objects)) is not None:
            raise _done_by_one_stage(cls, "backward", f"changes {name}")
        return found

    method = "setup_context" if cls.setup_context is not torch.autograd.Function.setup_context else "forward"
    plain = getattr(cls, method)

    def noting(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if guarded.expected is not None:
            setattr(ctx, _EXPECTED, guarded.expected)
        if parameters := _parameters_of(args):
            setattr(ctx, _GIVEN, parameters)
        return plain(ctx, *args, **kwargs)

    members = {"backward": staticmethod(checked), method: staticmethod(noting), "expected": None}
    guarded: Any = type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
    return guarded


_EXPECTED = "_expected_of_python"
"""Attribute of a context: what its backward has to find of Python."""


_GIVEN = "_given_parameters"
"""Attribute of a context: the parameters that its forward has been given, of modules too."""


def _parameters_of(args: Any) -> list[nn.Parameter]:
    """The parameters among arguments, and of the modules among them and of their methods."""
    modules = _modules_in(args)
    given = (arg for arg in args if isinstance(arg, nn.Parameter))
    return list(dict.fromkeys([*given, *(parameter for module in modules for parameter in module.parameters())]))


def _modules_in(args: Any) -> list[nn.Module]:
    """The modules among arguments, and those of the methods among them."""
    return [one for one in (getattr(arg, "__self__", arg) for arg in args) if isinstance(one, nn.Module)]


@contextmanager
def weights_stood_in(args: Any, data: Mapping[int, Tensor]) -> Iterator[None]:
    """While entered, others stand for the parameters and buffers of modules among arguments that other stages hold.

    Args:
        data: of those, by their ids; zeros stand for the others.
    """
    modules = _modules_in(args)
    held = [slots for module in modules for one in module.modules() for slots in (one._parameters, one._buffers)]
    absent = [(slots, name, one) for slots in held for name, one in slots.items() if type(one) is Placeholder]
    made: dict[int, Tensor] = {}
    for slots, name, one in absent:
        if id(one) not in made:
            own = data.get(id(one))
            own = torch.zeros(one.shape, dtype=one.dtype, device=one.device) if own is None else own.detach()
            made[id(one)] = nn.Parameter(own, one.requires_grad) if isinstance(one, nn.Parameter) else own
        slots[name] = made[id(one)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for slots, name, one in absent:
            slots[name] = one  # type: ignore[assignment]


def _gradient(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def _check_unchanged(cls: Any, use: Use, objects: Sequence[Any]) -> None:
    """Refuse to compute with other things of Python than the step had."""
    if (name := use.changed(objects)) is not None:
        code = cls.forward.__code__
        raise CallError(
            f"{cls.__name__} uses {name}, which is another one now than when the step called {cls.__name__}.apply, as "
            f"its stage computes later ({code.co_filename}:{code.co_firstlineno}): give apply the value as an argument"
        )


def inferred(cls: Any, call: Call, infer: Callable[[], Result | None]) -> tuple[Result | None, int]:
    """What `infer` gives, which runs the forward of a function of the user's, and how often that draws.

    Raises:
        NotImplementedError: it does more than that, or calls modules among the arguments that another stage holds and
            whose weights are not among the arguments, too.
    """
    before = dict(vars(cls))
    given = set(map(id, call.tensors))
    is_without = any(type(one) is Placeholder and id(one) not in given for one in _parameters_of(call.args))
    with nullcontext() if is_without else weights_stood_in(call.args, {}):
        found, num_draws, is_drawn = _infer_counted(infer)
        if is_drawn:  # perhaps by a module that was imported just now, which it is once
            found, num_draws, is_drawn = _infer_counted(infer)
    buffers = (buffer for module in _modules_in(call.args) for buffer in module.buffers())
    is_without |= any(type(one) is Placeholder and id(one) not in given for one in buffers)
    if found is None and is_without:
        raise NotImplementedError(
            f"{cls.__name__}.apply is given a module that another stage holds, and uses its weights ({users_line()}): "
            f"give apply the weights as tensors, and use those; to recompute layers, take torch.utils.checkpoint"
        )
    if is_drawn:
        raise _done_by_one_stage(cls, "forward", "draws from Python's or numpy's generator")
    _check_left_alone(cls, before, "forward")
    return found, num_draws


def _infer_counted(infer: Callable[[], Result | None]) -> tuple[Result | None, int, bool]:
    """What `infer` gives, its number of draws of torch's, and whether it draws from Python's or numpy's generator."""
    generators = python_states()
    with _Counted() as counted:
        found = infer()
    is_drawn = python_states() != generators
    set_python_states(*generators)
    return found, counted.number, is_drawn


def _check_left_alone(cls: Any, before: dict[str, Any], method: str) -> None:
    """Refuse a method that sets an attribute of its class, but for torch's own, which compile themselves."""
    if cls.__module__.startswith("torch."):
        return
    now = vars(cls)
    if len(now) != len(before) or any(value is not before.get(name) for name, value in now.items()):
        name = next(name for name, value in now.items() if value is not before.get(name))
        raise _done_by_one_stage(cls, method, f"sets {cls.__name__}.{name}")


def _done_by_one_stage(cls: Any, method: str, what: str) -> CallError:
    code = getattr(cls, method).__code__
    where, also = (
        (users_line(), "")
        if method == "forward"
        else (
            f"{code.co_filename}:{code.co_firstlineno}",
            "; what gradients are can be noted by tensor.register_hook",
        )
    )
    return CallError(
        f"{cls.__name__}.{method} {what}, which the stage that computes it would do alone ({where}): do it in "
        f"the step, and pass what it gives as an argument{also}"
    )
