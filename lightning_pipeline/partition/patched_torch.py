"""Calls of torch's that go past function modes, patched so that the recording of a running step sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily

from lightning_pipeline.partition.fast_paths import nested_tensors_padded
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.users_line import users_line

if TYPE_CHECKING:
    from lightning_pipeline.partition.recorder import Recorder
    from lightning_pipeline.partition.recording import Recording

_patched_for: list[Recorder] = []
"""Recorders whose runs need the patches."""
_patches = ExitStack()
_APPLY = vars(torch._C._FunctionBase)["apply"]
_AS_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Of scripted functions, and classes of autograd functions, one function each, by which events know their calls."""


@contextmanager
def classes_patched(recorder: Recorder) -> Iterator[None]:
    """While entered, a recorder's recordings see what goes past modes in torch's classes.

    For a whole run: a change to a class costs all of its methods the place that Python remembers for them.
    """
    if not _patched_for:
        _patches.enter_context(_function_apply_seen())
        _patches.enter_context(_scripted_seen())
        _patches.enter_context(_module_apply_seen())
        _patches.enter_context(nested_tensors_padded())
    _patched_for.append(recorder)
    try:
        yield
    finally:
        _patched_for.remove(recorder)
        if not _patched_for:
            _patches.close()


@contextmanager
def arrays_seen(recorder: Recorder) -> Iterator[None]:
    """While entered, the running recording notes the memory that tensors share with arrays."""
    plain = torch.from_numpy

    def seen(array: Any) -> Tensor:
        found = plain(array)
        if recorder.current is not None:
            recorder.current.exposed.add(memory_of(found))
        return found

    torch.from_numpy = seen  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.from_numpy = plain


def _running() -> Recording | None:
    """The recording that runs, if one does."""
    return next((recorder.current for recorder in _patched_for if recorder.current is not None), None)


def _as_function(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call what torch does not give to modes as if it did."""
    recording = _running()
    if recording is None or not torch._C._len_torch_function_stack() or not recording.is_ours((args, kwargs)):
        return function(*args, **kwargs)
    # As where torch gives a mode a function: without the mode, for the functions in this one are its own matter.
    with _pop_mode_temporarily() as mode:
        return mode.__torch_function__(function, (), args, kwargs)


@contextmanager
def _function_apply_seen() -> Iterator[None]:
    """While entered, modes see calls of `torch.autograd.Function.apply`."""
    # The user may have taken hold of it before (`relu = ReLU.apply`). Until torch 2.13 that is a function of Python's,
    # which goes on to the one that a base class has; since then it is the one of C++, which nothing comes between.
    owner: Any = torch.autograd.function._SingleLevelFunction
    plain = vars(torch.autograd.Function)["apply"]
    if plain is _APPLY:
        owner = torch.autograd.Function

    def seen(cls: Any, *args: Any, **kwargs: Any) -> Any:
        called = _AS_FUNCTIONS.get(cls)
        if called is None:
            called = _AS_FUNCTIONS[cls] = _applying(cls)
        return _as_function(called, args, kwargs)

    owner.apply = classmethod(seen)
    try:
        with _calls_past_patch_refused() if plain is _APPLY else nullcontext():
            yield
    finally:
        if plain is _APPLY:
            owner.apply = plain
        else:
            del owner.apply


@contextmanager
def _calls_past_patch_refused() -> Iterator[None]:
    """While entered, functions whose C++ `apply` was taken before tell so when a step calls them: what they compute
    would be seen, but not their backward. All that comes to Python of such a call is that it looks for `forward`."""
    owner: Any = torch.autograd.function.FunctionMeta

    def attribute(cls: Any, name: str) -> Any:
        found = type.__getattribute__(cls, name)
        if name != "forward" or sys._getframe(1).f_code is _SEEN or _running() is None:
            return found

        def forward(*args: Any, **kwargs: Any) -> Any:
            recording = _running()
            if recording is not None and torch._C._len_torch_function_stack() and recording.is_ours((args, kwargs)):
                raise NotImplementedError(
                    f"{users_line()} calls {cls.__name__}.apply by a name that was given to it before, as with "
                    f"`function = {cls.__name__}.apply`: from torch 2.14 on this goes past what a pipeline can see. "
                    f"Write a function, `def function(*args): return {cls.__name__}.apply(*args)`"
                )
            return found(*args, **kwargs)

        return forward

    owner.__getattribute__ = attribute
    try:
        yield
    finally:
        del owner.__getattribute__


def _applying(cls: type) -> Callable[..., Any]:
    apply = _APPLY.__get__(None, cls)

    def function(*args: Any, **kwargs: Any) -> Any:
        return apply(*args, **kwargs)

    function.__name__ = f"{cls.__name__}.apply"
    function.runs_python = True  # type: ignore[attr-defined]
    return function


_SEEN = _applying(torch.autograd.Function).__code__
"""What calls the C++ `apply` where the call has been seen."""


@contextmanager
def _scripted_seen() -> Iterator[None]:
    """While entered, modes see calls of functions that were scripted or traced."""
    owner = torch._C.ScriptFunction
    plain = owner.__call__

    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        called = _AS_FUNCTIONS.get(self)
        if called is None:
            called = _AS_FUNCTIONS[self] = partial(plain, self)
        return _as_function(called, args, kwargs)

    owner.__call__ = seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        owner.__call__ = plain  # type: ignore[method-assign]


@contextmanager
def _module_apply_seen() -> Iterator[None]:
    """While entered, a module that is moved to where it is already (`self.head.to(x.dtype)`) is left alone, and no
    gradients are looked for."""
    plain = nn.Module._apply

    def seen(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if _running() is not None:
            tensors = [*self.parameters(recurse), *self.buffers(recurse)]
            if all(fn(tensor) is tensor for tensor in tensors):
                return self
        return plain(self, fn, recurse)

    nn.Module._apply = seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]
