"""Calls of modules: their stages, and those that are recorded as one event because they only compute.

What such a call comes to follows from its class, its plain attributes, its parameters and its argument. All of them are
compared at every call, which costs a tenth of running the Python of a module on placeholders. Everything else (hooks,
an own ``forward``, a function mode of the user's, autocast) takes the usual way, function by function.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import getitem, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_pipeline.partition.compiled import is_compiled
from lightning_pipeline.partition.overrides import HOOKS, has_forward, hooks_of, overridden
from lightning_pipeline.partition.ownership import HELD_BY
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.stage_config import StageMap
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.matcher import CAPTURED, renewed

IS_KEYED = "is_keyed"
"""Marks what is put around the forward of a module with a key."""


class KeyedCalls:
    """Notes, while steps run, the calls of modules that have keys.

    Attributes:
        stage: of the module that runs, None where no key says one; and the lowest that it may have.
        name: of the innermost module with a key.
        stages: of the modules with keys.
    """

    def __init__(self, root: nn.Module, stages: StageMap) -> None:
        self.stage: tuple[int | None, int] = (None, 0)
        self.name = ""
        self.stages = stages
        self.root = root
        self._thread = 0
        self._forwards: list[_Forward] | None = None

    def forget(self) -> None:
        """The root has other modules than before."""
        self._forwards = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While entered, calls in this thread are noted."""
        self._thread = threading.get_ident()
        if self._forwards is None or not all(map(_Forward.is_current, self._forwards)):
            self._forwards = self._made()
        with overridden() as override:
            for forward in self._forwards:
                override(forward.module, "forward", forward.noted)
            yield

    def _made(self) -> list[_Forward]:
        found = []
        modules = dict(self.root.named_modules(remove_duplicate=False))
        for name in {*self.stages.exact, *self.stages.minimum}:
            module = modules.get(name)
            if module is not None and has_forward(module):
                stage = self.stages.exact.get(name), self.stages.minimum.get(name, 0)
                noted = self._noted(name, stage, module.forward)
                found.append(_Forward(module, vars(module).get("forward"), type(module).forward, noted))
        return found

    def _noted(self, name: str, stage: tuple[int | None, int], forward: Callable[..., Any]) -> Callable[..., Any]:

        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return forward(*args, **kwargs)
            before = self.stage, self.name
            self.stage, self.name = stage, name
            try:
                return forward(*args, **kwargs)
            finally:
                self.stage, self.name = before

        vars(noted)[IS_KEYED] = True
        return noted


class _Forward(NamedTuple):
    """A module's forward.

    Attributes:
        own: the instance's, which users may have replaced.
        of_class: its class's.
        noted: what is called instead.
    """

    module: nn.Module
    own: Any
    of_class: Any
    noted: Callable[..., Any]

    def is_current(self) -> bool:
        return vars(self.module).get("forward") is self.own and type(self.module).forward is self.of_class


_FILES = ("activation", "container", "conv", "dropout", "flatten", "linear", "normalization", "pooling", "sparse")
_ENTERED = (nn.MultiheadAttention, nn.EmbeddingBag, nn.CrossMapLRN2d)
"""Of classes in these files, those that decide by more than their attributes, or give more than one tensor."""
PURE = frozenset(
    cls
    for cls in vars(nn).values()
    if isinstance(cls, type)
    and issubclass(cls, nn.Module)
    and cls.__module__.rpartition(".")[2] in _FILES
    and cls not in _ENTERED
    and "Lazy" not in cls.__name__
    and cls.forward is not nn.Module.forward
)
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{kind}") for kind in HOOKS)
DRAW, ARGUMENT = object(), object()
_PLAIN = (bool, int, float, str, tuple, type(None))


class Shortcut(NamedTuple):
    """Where a call leads from an event.

    Attributes:
        state: of the module.
        argument: the number of the value that it is given; None for a tensor that every rank has.
        spec: of that.
        grad: whether autograd was on.
        end: the call's last event; its first result is the call's, or else it gives its argument.
        captures: what the call takes along, in order: `DRAW`, `ARGUMENT`, or a number.
    """

    state: PureModule
    argument: int | None
    spec: TensorSpec
    grad: bool
    end: Event
    captures: tuple[Any, ...]

    def is_for(self, argument: Tensor) -> bool:
        if type(argument) is Placeholder:
            return argument.value == self.argument and argument.spec is self.spec
        spec = self.spec
        return (
            self.argument is None
            and argument.shape == spec.shape
            and argument.dtype is spec.dtype
            and argument.requires_grad is spec.requires_grad
            and argument.layout is torch.strided
            and argument.stride() == spec.stride
            and argument.device == spec.device
        )


class PureModule:
    """A module of `PURE` classes throughout, as it is now."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        places = [(vars(m), key) for m in modules for key, value in vars(m).items() if type(value) in _PLAIN]
        slots: list[tuple[Any, str]] = [(m._parameters, key) for m in modules for key in m._parameters]
        children: list[tuple[Any, str]] = [(m._modules, key) for m in modules for key in m._modules]
        self._modules = modules
        self._classes = list(map(type, modules))
        self._hooks = [*_GLOBAL_HOOKS, *(hooks for m in modules for hooks in hooks_of(m))]
        self._sized = [*map(vars, modules), *(m._parameters for m in modules), *(m._modules for m in modules)]
        self._sizes = list(map(len, self._sized))
        everything = [*places, *slots, *children]
        self._places, self._keys = [place for place, _ in everything], [key for _, key in everything]
        self._num_plain = len(places)
        self._plain = [place[key] for place, key in places]
        self._others: list[Any] = [slot[key] for slot, key in (*slots, *children)]
        self._parameters = [p for p in self._others[: len(slots)] if p is not None]
        self._trains = [p.requires_grad for p in self._parameters]

    def is_unchanged(self) -> bool:
        """Whether a call would still come to the same."""
        if any(self._hooks) or list(map(len, self._sized)) != self._sizes:
            return False
        now = list(map(getitem, self._places, self._keys))
        return (
            all(map(is_, now[self._num_plain :], self._others))
            and now[: self._num_plain] == self._plain
            and list(map(type, self._modules)) == self._classes
            and [parameter.requires_grad for parameter in self._parameters] == self._trains
        )


def is_pure(module: nn.Module) -> bool:
    """Whether a module and all that is in it may count as `PureModule`."""
    return all(type(m) in PURE and is_own(m) and not m._buffers and not any(hooks_of(m)) for m in module.modules())


def is_own(module: nn.Module) -> bool:
    """Whether the forward of a module is that of its class, but for what `KeyedCalls` puts around it."""
    return hasattr(vars(module).get("forward", nn.Module.forward), IS_KEYED) or "forward" not in vars(module)


def pure_within(root: nn.Module) -> Iterator[nn.Module]:
    """The outermost pure modules, each once; none in compiled ones."""
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if is_compiled(module):
            return
        if is_pure(module):
            yield module
            return
        for child in module.children():
            yield from walk(child)

    for child in root.children():
        yield from walk(child)


def calls_of(module: nn.Module, recorder: Any) -> Callable[..., Any]:
    """What is called in place of ``module._call_impl`` while steps are recorded.

    Args:
        recorder: has the recording that runs as ``current``.
    """
    plain = nn.Module._call_impl
    state: PureModule | None = None
    refs = sys.getrefcount
    is_grad_enabled, is_inference, is_autocast = (
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        torch._C._is_any_autocast_enabled,
    )
    num_modes, unseen = torch._C._len_torch_function_stack, torch._C.DisableTorchFunction

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal state
        recording = recorder.current
        if recording is None or kwargs or len(args) != 1 or is_autocast() or is_inference():
            return plain(module, *args, **kwargs)
        argument = args[0]
        kind = type(argument)
        is_value = kind is Placeholder and argument.recording is recording
        is_plain = kind is Tensor and HELD_BY not in argument.__dict__
        if not (is_value or is_plain) or num_modes() != recording.num_modes:
            return plain(module, argument)
        begin = recording.event
        with unseen():
            if state is None or not state.is_unchanged():
                state = PureModule(module) if is_pure(module) else None
            known: Any = None if begin.shortcuts is None else begin.shortcuts.get(module)
            is_known = known is not None and known.state is state and known.is_for(argument)
        if state is None:
            return plain(module, argument)
        if is_known and is_grad_enabled() is known.grad:
            for capture in known.captures:
                if capture is DRAW:
                    recording.note_draw()
                elif capture is ARGUMENT:
                    recording.capture(argument)
                else:
                    recording.captured.append(capture)
            end = recording.event = known.end
            recording.skipped[end] = begin
            if end.outputs[0] is None:
                return argument
            place, spec = end.pool[0], end.result.tensors[0]
            if refs(place) != 3 or place.spec is not spec:
                place = end.pool[0] = renewed(place, spec, place.what)
            place.value, place.recording = end.outputs[0], recording
            return place
        value, spec, grad = argument.value if is_value else None, TensorSpec.of(argument), is_grad_enabled()
        result = plain(module, argument)
        end = recording.event
        captures = _captures(begin, end, argument, value, recording.captured)
        if captures is not None and type(result) is Placeholder and _gives(end, result, argument):
            shortcut = Shortcut(state, value, spec, grad, end, captures)
            begin.shortcuts = {**(begin.shortcuts or {}), module: shortcut}
        return result

    return call


def _gives(end: Event, result: Placeholder, argument: Tensor) -> bool:
    """Whether a call's result is its last event's first, or its argument."""
    return result is argument if end.outputs[0] is None else result.value == end.outputs[0]


def _captures(
    begin: Event, end: Event, argument: Tensor, value: int | None, captured: Sequence[Any]
) -> tuple[Any, ...] | None:
    """What a call has taken along; None if it did anything else than to compute from its argument, numbers, and the
    module's tensors.

    Args:
        value: the number of the argument; None for a tensor that every rank has.
        captured: what the recording has taken along.
    """
    found: list[Any] = []
    event: Event | None = end
    if end is begin or len(end.outputs) != 1:
        return None
    while event is not begin:
        assert event is not None
        if event.writes or event.visit < 0 or event.match is not event.matcher.match:  # it depends on data
            return None
        for number in event.inputs:
            is_own = type(number) is int and (number < 0 or number == value or number >= begin.num_values)
            if number is not CAPTURED and not is_own:
                return None
        for place in reversed(range(event.matcher.num_captured)):
            content = captured[event.first_captured + place]
            if place == 0 and event.draws:
                found.append(DRAW)
            elif content is argument:
                found.append(ARGUMENT)
            elif type(content) in (int, float):
                found.append(content)
            else:
                return None
        event = event.parent
    found.reverse()
    return tuple(found)
