"""Calls of `torch.utils.checkpoint.checkpoint`, whoever makes them.

It is imported by name all over libraries, so what it calls is what is replaced, while a step runs and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.nn.utils import stateless

from lightning_pipeline import _torch
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.python_again import CheckpointCall

Checkpointed = Callable[[CheckpointCall], AbstractContextManager[None]]
"""Entered around a checkpointed function."""
_SINCE_2_14 = "_checkpoint_without_reentrant_generator_impl"
_GENERATOR = _SINCE_2_14 if hasattr(torch_checkpoint, _SINCE_2_14) else "_checkpoint_without_reentrant_generator"
"""What torch's function calls, with the options by name (since 2.14) or in order."""
_SWAPPING = "_reparametrize_module"
"""What `functional_call` enters."""


@contextmanager
def checkpoints_noted(around: Checkpointed) -> Iterator[None]:
    """While entered, checkpointed functions run once, inside of `around`."""
    options = _options()
    swapped: list[Any] = []  # modules whose tensors `functional_call` has replaced
    everywhere = getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)

    def generator(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        given = {**dict(zip(options, args, strict=False)), **kwargs}
        # Modes that choose what to keep have nothing to choose from here: all of it is computed again.
        now, then = (
            nullcontext() if isinstance(one, _torch.TorchDispatchMode) else one
            for one in given.get("context_fn", torch_checkpoint.noop_context_fn)()
        )
        stops = getattr(torch_checkpoint, "_enable_checkpoint_early_stop", everywhere)
        stops_early = given.get("early_stop", True) if stops is None else bool(stops)
        own = {name: value for name, value in kwargs.items() if name not in options}
        with ExitStack() as stack:
            if torch.is_grad_enabled():
                _refuse_swapped(swapped)
                call = CheckpointCall(given[options[0]], args[len(options) :], own, stops_early, then)
                stack.enter_context(around(call))
                stack.enter_context(now)
            yield

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not torch.is_grad_enabled() or not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():  # whatever the parameters do, this kind gives results that require no gradient
                return function(*args)
        _refuse_swapped(swapped)
        with around(CheckpointCall(function, args, {}, stops_early=False)):
            return function(*args)

    with _replaced(generator, SimpleNamespace(apply=apply)), overridden() as override:
        override(stateless, _SWAPPING, partial(_swapping, getattr(stateless, _SWAPPING), swapped))
        yield


@contextmanager
def _swapping(plain: Callable[..., Any], swapped: list[Any], module: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    with plain(module, *args, **kwargs):
        swapped.append(module)
        try:
            yield
        finally:
            swapped.pop()


def _refuse_swapped(swapped: Sequence[Any]) -> None:
    """Refuse a checkpointed function in a `functional_call`."""
    if swapped:
        raise torch_checkpoint.CheckpointError(
            f"a checkpointed function is called within a functional_call of {type(swapped[-1]).__name__} "
            f"({users_line()}): backward runs it again when the module has its own tensors back, and computes with "
            f"those. Do without the checkpoint, or checkpoint the functional_call itself"
        )


@cache
def _options() -> list[str]:
    """Names of what torch's function takes, in order."""
    plain = signature(getattr(torch_checkpoint, _GENERATOR))
    return [p.name for p in plain.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


@contextmanager
def checkpoints_wrapped(wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While entered, `wrapped` makes of a checkpointed function the one that computes it again."""
    plain, reentrant = getattr(torch_checkpoint, _GENERATOR), torch_checkpoint.CheckpointFunction

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        return plain(wrapped(function), *args, **kwargs)

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return reentrant.apply(_first(function, wrapped(function)), preserve, *args)

    with _replaced(generator, SimpleNamespace(apply=apply)):
        yield


def _first(function: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """One function for the first call, another one for those after it."""
    calls = 0

    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*args) if calls == 1 else then(*args)

    return run


@contextmanager
def _replaced(generator: Any, reentrant: Any) -> Iterator[None]:
    with overridden() as override:
        override(torch_checkpoint, _GENERATOR, generator)
        override(torch_checkpoint, "CheckpointFunction", reentrant)
        yield
