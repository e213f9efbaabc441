"""Parts of torch that function modes do not see, patched while a step is recorded.

Calls of `torch.utils.checkpoint.checkpoint`, whoever makes them.

It is imported by name all over libraries, so what it calls is what is replaced, while a step runs and no longer.

Torch's transformer layers, which compute otherwise where nobody looks on.

In evaluation `nn.TransformerEncoder`, its layers and `nn.MultiheadAttention` take a fused path: other bits, and zeros
where there is padding, which the encoder leaves out by making nested tensors. They do not take it where
`has_torch_function` says that somebody wants to see each operation. Our modes want to see what one process computes:

    nested tensor                    on stages
    -------------                    ---------
    _nested_tensor_from_mask         the padded tensor with zeros where there is padding; its mask is remembered
    _transformer_encoder_layer_fwd   makes a nested tensor of it, and pads what comes of that: one function
    to_padded_tensor                 the padded tensor

To pad and to unpad copies elements, so the bits are those of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.recording.contexts import contexts_refused
from lightning_pipeline.recording.function_calls import APPLY, applying, with_state
from lightning_pipeline.recording.process_flags import flags_of_steps
from lightning_pipeline.recording.python_again import CheckpointCall

if TYPE_CHECKING:
    from lightning_pipeline.recording.recorder import Recorder
    from lightning_pipeline.recording.recording import Recording


Checkpointed = Callable[[CheckpointCall], AbstractContextManager[None]]
"""Entered around a checkpointed function."""
_SINCE_2_14 = "_checkpoint_without_reentrant_generator_impl"
_GENERATOR = _SINCE_2_14 if hasattr(torch_checkpoint, _SINCE_2_14) else "_checkpoint_without_reentrant_generator"
"""What torch's function calls, with the options by name (since 2.14) or in order."""


@contextmanager
def checkpoints_noted(around: Checkpointed) -> Iterator[None]:
    """While entered, checkpointed functions run once, inside of `around`."""
    options = _options()
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
                call = CheckpointCall(given[options[0]], args[len(options) :], own, stops_early, then)
                stack.enter_context(around(call))
                stack.enter_context(now)
            yield

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not torch.is_grad_enabled() or not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():  # whatever the parameters do, this kind gives results that require no gradient
                return function(*args)
        with around(CheckpointCall(function, args, {}, stops_early=False)):
            return function(*args)

    with _replaced(generator, SimpleNamespace(apply=apply)):
        yield


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
    before = getattr(torch_checkpoint, _GENERATOR), torch_checkpoint.CheckpointFunction
    setattr(torch_checkpoint, _GENERATOR, generator)
    torch_checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]
    try:
        yield
    finally:
        setattr(torch_checkpoint, _GENERATOR, before[0])
        torch_checkpoint.CheckpointFunction = before[1]  # type: ignore[misc]


_PACKAGE = __name__.partition(".")[0]
_from_mask = _torch.nested_tensor_from_mask
_layer = _torch.transformer_encoder_layer
_attention = _torch.native_multi_head_attention


@contextmanager
def fast_paths_open() -> Iterator[None]:
    """While entered, torch's layers take no notice of our modes and placeholders."""
    plain = torch.overrides.has_torch_function

    def has_torch_function(arguments: Any) -> bool:
        return plain(arguments) and not (
            all(type(one).__module__.startswith(_PACKAGE) for one in _torch.function_modes())
            and all(type(one) in (Tensor, nn.Parameter, Placeholder) for one in arguments if isinstance(one, Tensor))
        )

    with _class_replaced(torch.overrides, "has_torch_function", has_torch_function):
        yield


@contextmanager
def nested_tensors_padded() -> Iterator[None]:
    """While entered, padded tensors stand for the nested ones of `nn.TransformerEncoder`."""
    kept: Any = WeakTensorKeyDictionary()  # which elements of a padded tensor are there
    aligned, padded = _torch.is_nested_mask_left_aligned, Tensor.to_padded_tensor

    def from_mask(tensor: Tensor, mask: Tensor, mask_check: bool = True) -> Tensor:
        if not _is_seen():
            return _from_mask(tensor, mask, mask_check)
        made = tensor.masked_fill(mask.logical_not().unsqueeze(-1), 0.0)
        kept[made] = mask
        return made

    def left_aligned(tensor: Tensor, mask: Tensor) -> bool:
        if not _is_seen():
            return aligned(tensor, mask)
        return bool((mask[:, 1:] <= mask[:, :-1]).all())

    def layer(tensor: Tensor, *others: Any, **named: Any) -> Tensor:
        mask = kept.get(tensor)
        if mask is None:
            return _layer(tensor, *others, **named)
        made = handle_torch_function(layer_on_nested, (tensor, mask), tensor, mask, *others, **named)
        kept[made] = mask
        return made

    def attention_seen(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        if not _is_seen():
            return _attention(*arguments)
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        return handle_torch_function(attention, tensors, *arguments)

    def to_padded_tensor(tensor: Tensor, *others: Any, **named: Any) -> Tensor:
        return tensor if tensor in kept else padded(tensor, *others, **named)

    with ExitStack() as replaced:
        for owner, function in (
            (torch, ("_nested_tensor_from_mask", from_mask)),
            (torch, ("_nested_tensor_from_mask_left_aligned", left_aligned)),
            (torch, ("_transformer_encoder_layer_fwd", layer)),
            (torch, ("_native_multi_head_attention", attention_seen)),
            (Tensor, ("to_padded_tensor", to_padded_tensor)),
        ):
            replaced.enter_context(_class_replaced(owner, *function))
        yield


def layer_on_nested(tensor: Tensor, mask: Tensor, *others: Any, **named: Any) -> Tensor:
    """A transformer layer on the elements of a padded tensor that `mask` keeps."""
    if type(tensor) is not Tensor:  # a fake one, of which only the spec is asked for
        return _layer(tensor, *others, **named)
    nested = _from_mask(tensor, mask, mask_check=False)
    return _layer(nested, *others, **named).to_padded_tensor(0.0, tensor.size())


def attention(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention`. Weights that nobody needs are none: fake tensors would have some."""
    output, weights = _attention(*arguments)
    return output, weights if arguments[10] else None


def _is_seen() -> bool:
    return bool(_torch.num_function_modes())


@contextmanager
def _class_replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, plain)


_patched_for: list[Recorder] = []
"""Recorders whose runs need the patches."""
_patches = ExitStack()
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
        _patches.enter_context(flags_of_steps(running_recording))
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

    with ExitStack() as replaced:
        for name in _OF_ARRAYS:
            replaced.enter_context(_class_replaced(torch, name, seeing(getattr(torch, name))))
        yield


def running_recording() -> Recording | None:
    """The recording that runs, if one does."""
    return next((recorder.current for recorder in _patched_for if recorder.current is not None), None)


def _as_function(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call what torch does not give to modes as if it did."""
    recording = running_recording()
    if recording is None or not _torch.num_function_modes() or not recording.is_ours((args, kwargs)):
        return function(*args, **kwargs)
    # As where torch gives a mode a function: without the mode, for the functions in this one are its own matter.
    with _torch.innermost_mode_taken_off() as mode:
        found = mode.__torch_function__(function, (), with_state(function, args), kwargs)
    recording.note_draws_within(function)
    return found


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

    owner.apply = classmethod(seen)
    try:
        with _calls_past_patch_refused() if plain is APPLY else nullcontext():
            yield
    finally:
        if plain is APPLY:
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

    owner.__getattribute__ = attribute
    try:
        yield
    finally:
        del owner.__getattribute__


_SEEN = applying(torch.autograd.Function).__code__
"""What calls the C++ `apply` where the call has been seen."""


@contextmanager
def _scripted_seen() -> Iterator[None]:
    """While entered, modes see calls of functions that were scripted or traced."""
    owner = _torch.ScriptFunction
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
        if running_recording() is not None:
            tensors = [*self.parameters(recurse), *self.buffers(recurse)]
            if all(fn(tensor) is tensor for tensor in tensors):
                return self
        return plain(self, fn, recurse)

    nn.Module._apply = seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]
