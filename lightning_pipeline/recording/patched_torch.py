"""Parts of torch that function modes do not see, patched while a step is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_pipeline import _torch
from lightning_pipeline.partition import users_code
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.torch_functions import FunctionKind, kind_of
from lightning_pipeline.partition.users_code import in_hook, users_line
from lightning_pipeline.recording.contexts import contexts_refused
from lightning_pipeline.recording.function_calls import APPLY, applying, are_hooked_by_module, with_use
from lightning_pipeline.recording.patched_layers import nested_tensors_padded
from lightning_pipeline.recording.process_flags import flags_of_steps
from lightning_pipeline.recording.scripted import scripted_seen
from lightning_pipeline.recording.tensor_copies import copies_of_parameters_seen, variables_seen

if TYPE_CHECKING:
    from lightning_pipeline.recording.recorder import Recorder
    from lightning_pipeline.recording.recording import Recording


_patched_for: list[Recorder] = []
"""Recorders whose runs need the patches."""
_patches = ExitStack()
_AS_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Of classes of autograd functions, one function each, by which events know their calls."""


@contextmanager
def classes_patched(recorder: Recorder) -> Iterator[None]:
    """While entered, a recorder's recordings see what goes past modes in torch's classes.

    For a whole run: a change to a class costs all of its methods the place that Python remembers for them.
    """
    if not _patched_for:
        _patches.enter_context(_function_apply_seen())
        _patches.enter_context(scripted_seen(_scripted, in_stages=True))
        _patches.enter_context(_module_apply_seen())
        _patches.enter_context(nested_tensors_padded())
        _patches.enter_context(copies_of_parameters_seen(_is_of_step))
        _patches.enter_context(variables_seen())
        _patches.enter_context(flags_of_steps(running_recording))
        override = _patches.enter_context(overridden())
        override(users_code, "step_runs", lambda: running_recording() is not None)
        _patches.enter_context(contexts_refused(lambda: running_recording() is not None))
    _patched_for.append(recorder)
    try:
        yield
    finally:
        _patched_for.remove(recorder)
        if not _patched_for:
            _patches.close()


_OF_ARRAYS = ("from_numpy", "as_tensor", "asarray", "from_dlpack", "frombuffer")
"""Functions of torch whose results may share their memory with an array."""


@contextmanager
def arrays_seen(recorder: Recorder) -> Iterator[None]:
    """While entered, the running recording notes the memory that tensors share with arrays."""

    def seeing(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def seen(source: Any, *args: Any, **kwargs: Any) -> Tensor:
            found = plain(source, *args, **kwargs)
            if recorder.current is not None and not isinstance(source, (Tensor, list, tuple, int, float)):
                recorder.current.memory.exposed.add(memory_of(found))
            return found

        return seen

    with overridden() as override:
        for name in _OF_ARRAYS:
            override(torch, name, seeing(getattr(torch, name)))
        yield


def running_recording() -> Recording | None:
    """The recording that runs, if one does."""
    return next((recorder.current for recorder in _patched_for if recorder.current is not None), None)


def _is_of_step(tensor: Tensor) -> bool:
    """Whether a step runs, and only some ranks hold a tensor that it uses."""
    recording = running_recording()
    return recording is not None and _torch.num_function_modes() > 0 and recording.is_ours((tensor,))


def _as_function(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call what torch does not give to modes as if it did."""
    recording = running_recording()
    if recording is None or not _torch.num_function_modes():
        return function(*args, **kwargs)
    is_drawing = kind_of(function) is FunctionKind.DRAWS
    if not is_drawing and not recording.is_ours((args, kwargs)) and not are_hooked_by_module(function, args):
        return function(*args, **kwargs)
    # As where torch gives a mode a function: without the mode, for the functions in this one are its own matter.
    with _torch.innermost_mode_taken_off() as mode:
        found = mode.__torch_function__(function, (), with_use(function, args, recording.recorder.places), kwargs)
    recording.note_draws_within(function)
    return found


def _scripted(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a scripted function, which in hooks is one call, too."""
    if in_hook.is_here() and in_hook.take is not None and _torch.num_function_modes():
        return in_hook.take(function, args, kwargs)
    return _as_function(function, args, kwargs)


@contextmanager
def _function_apply_seen() -> Iterator[None]:
    """While entered, modes see calls of `torch.autograd.Function.apply`."""
    # The user may have taken hold of it before (`relu = ReLU.apply`). Until torch 2.13 that is a function of Python's,
    # which goes on to the one that a base class has; since then it is the one of C++, which nothing comes between.
    owner: Any = _torch.SingleLevelFunction
    plain = vars(torch.autograd.Function)["apply"]
    if plain is APPLY:
        owner = torch.autograd.Function

    def seen(cls: Any, *args: Any, **kwargs: Any) -> Any:
        called = _AS_FUNCTIONS.get(cls)
        if called is None:
            called = _AS_FUNCTIONS[cls] = applying(cls)
        return _as_function(called, args, kwargs)

    with overridden() as override, _calls_past_patch_refused() if plain is APPLY else nullcontext():
        override(owner, "apply", classmethod(seen))
        yield


@contextmanager
def _calls_past_patch_refused() -> Iterator[None]:
    """While entered, functions whose C++ `apply` was taken before tell so when a step calls them: what they compute
    would be seen, but not their backward. All that comes to Python of such a call is that it looks for `forward`."""

    def attribute(cls: Any, name: str) -> Any:
        found = type.__getattribute__(cls, name)
        if name != "forward" or sys._getframe(1).f_code is _SEEN or running_recording() is None:
            return found

        def forward(*args: Any, **kwargs: Any) -> Any:
            recording = running_recording()
            if recording is not None and _torch.num_function_modes() and recording.is_ours((args, kwargs)):
                raise NotImplementedError(
                    f"{users_line()} calls {cls.__name__}.apply by a name that was given to it before, as with "
                    f"`function = {cls.__name__}.apply`: from torch 2.14 on this goes past what a pipeline can see. "
                    f"Write a function, `def function(*args): return {cls.__name__}.apply(*args)`"
                )
            return found(*args, **kwargs)

        return forward

    with overridden() as override:
        override(torch.autograd.function.FunctionMeta, "__getattribute__", attribute)
        yield


_SEEN = applying(torch.autograd.Function).__code__
"""What calls the C++ `apply` where the call has been seen."""


@contextmanager
def _module_apply_seen() -> Iterator[None]:
    """While entered, a module that is moved to where it is already (`self.head.to(x.dtype)`) is left alone, and no
    gradients are looked for."""
    plain = nn.Module._apply

    def seen(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if running_recording() is not None:
            tensors = [*self.parameters(recurse), *self.buffers(recurse)]
            if all(fn(tensor) is tensor for tensor in tensors):
                return self
        return plain(self, fn, recurse)

    with overridden() as override:
        override(nn.Module, "_apply", seen)
        yield
