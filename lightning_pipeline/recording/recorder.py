"""The recorder: state shared by all recordings of a module's steps."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.compiled_calls import CompiledCall, compiled_calls
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.function_calls import inferred
from lightning_pipeline.recording.inference import Inference, Result
from lightning_pipeline.recording.keyed_calls import KeyedCalls
from lightning_pipeline.recording.matcher import HookTensor
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.operation import Call, key_of
from lightning_pipeline.recording.patched_checkpoint import checkpoints_noted
from lightning_pipeline.recording.patched_torch import arrays_seen, classes_patched
from lightning_pipeline.recording.pure_modules import pure_within
from lightning_pipeline.recording.python_again import CheckpointCall
from lightning_pipeline.recording.python_state import Unclear
from lightning_pipeline.recording.reachable_state import Places
from lightning_pipeline.recording.shortcuts import calls_of
from lightning_pipeline.recording.views import Views

if TYPE_CHECKING:
    from lightning_pipeline.recording.kept_views import ViewOfModule
    from lightning_pipeline.recording.recording import Recording

MAX_EVENTS = 100_000
"""The most events that are kept, each some kilobytes; then the paths that were not met for longest are forgotten."""
MAX_CHANGING = 256
"""The most tensors that are known to change in steps."""


class Reads(Protocol):
    """Brings a recording the data that the step's Python asks for."""

    def read(self, recording: Recording, values: Sequence[int]) -> list[Tensor]:
        """The data, on every rank, of values that a stage computes."""

    def read_held(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The data of tensors that only some ranks hold: the module's, or made in hooks."""

    def finish_before(self, recording: Recording, *, with_own: bool) -> None:
        """Finish earlier micro-batches, and `with_own` the recording's own calls so far."""

    def shown(self, recording: Recording, value: int, show: Callable[[Tensor], str]) -> str:
        """What `show` makes of a value, or of a tensor of the module (below zero), with its autograd state."""


class Recorder:
    """What the recordings of a module's steps have in common.

    Args:
        calls: tells the stage of the module that runs.
        placement: the rank of each virtual stage along the data.

    Attributes:
        has_hooks: whether there are hooks on parameters, so that every micro-batch runs in order.
        has_replicas: whether there are others of the module, which draw other random numbers.
        warns: whether this rank warns of compiled code that runs as it was written.
        infers: whether a module runs now only to learn what it gives.
        recordings: those of the running step.
        current: the one that runs.
        num_events: that follow each beginning; the beginning that was met last comes last.
        changing: memory that all ranks have and write into in steps while stages may still have to use it, with a
            tensor that has it: recordings take along copies of such tensors.
        used: memory of buffers that all ranks have and stages use, with the buffers' numbers.
        places: what checkpointed functions can change of Python.
        views_of_module: those that the last step has kept, to be made again by what is to come.
    """

    def __init__(self, tensors: ModuleTensors, calls: KeyedCalls, placement: Sequence[int]) -> None:
        self.tensors = tensors
        self.calls = calls
        self.placement = placement
        self.num_stages = len(placement)
        self.inference = Inference()
        self.has_hooks = False
        self.has_replicas = False
        self.warns = True
        self.infers = False
        self.recordings: list[Recording] = []
        self.changing: OrderedDict[int, Tensor] = OrderedDict()
        self.used: dict[int, int] = {}
        self.places: OrderedDict[Any, Places] = OrderedDict()
        self.current: Recording | None = None
        self.views_of_module: list[ViewOfModule] = []
        self.num_events: dict[Event, int] = {}
        self._beginnings: dict[Any, Event] = {}
        self._calls_of_pure: list[tuple[dict[str, Any], Callable[..., Any]]] | None = None
        self._compiled: list[CompiledCall] = []
        self._results: dict[Any, Result | None] = {}
        self._views: dict[Event, Views] = {}
        self._compiled_functions: set[str] = set()

    def beginning(self, key: Any, num_values: int) -> Event:
        """Where the paths of micro-batches of one kind begin."""
        key = (key, torch.get_default_dtype())  # which hooks may set
        found = self._beginnings.get(key)
        if found is None:
            found = self._beginnings[key] = Event.beginning(num_values, repr(num_values).encode())
        self.num_events[found] = self.num_events.pop(found, 0)
        return found

    def trim(self) -> bool:
        """Forget the oldest paths where there are too many events, as where data decides the path.

        Called between steps, on all ranks alike. Returns whether anything was forgotten.
        """
        if sum(self.num_events.values()) <= MAX_EVENTS:
            return False
        while self.num_events and sum(self.num_events.values()) > MAX_EVENTS // 2:
            oldest = next(iter(self.num_events))
            del self.num_events[oldest]
            self._beginnings = {key: one for key, one in self._beginnings.items() if one is not oldest}
        self._results.clear()
        return True

    def forget(self) -> None:
        """Forget everything: the module has other tensors now, or other ranks hold them."""
        self.forget_paths()
        self.used.clear()
        self.places.clear()
        self._calls_of_pure = None
        self.calls.forget()

    def forget_paths(self) -> None:
        """Let micro-batches to come begin anew."""
        self._beginnings.clear()
        self._views.clear()
        self.num_events.clear()

    def views_at(self, end: Event) -> Views:
        """Of a whole path, the values that share memory."""
        found = self._views.get(end)
        if found is None:
            found = self._views[end] = Views()
            for event in end.path():
                if event.visit >= 0:
                    found.note(event)
        return found

    def note_changing(self, memory: int, tensor: Tensor) -> None:
        """Note that steps write into a tensor while stages may still have to use it."""
        self.changing[memory] = tensor
        if len(self.changing) > MAX_CHANGING:
            self.changing.popitem(last=False)
        self.forget_paths()

    def held(self, ranks: tuple[int, ...]) -> HookTensor:
        """What stands for a tensor that was made in a hook, and is on these ranks."""
        return HookTensor(ranks, tuple(stage for stage, rank in enumerate(self.placement) if rank in ranks))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While entered, steps can be recorded."""
        if self._calls_of_pure is None:
            self._calls_of_pure = [(vars(m), calls_of(m, self)) for m in pure_within(self.calls.root)]
            self._compiled = compiled_calls(self.calls.root, self)
        for compiled in self._compiled:
            compiled.note_plain()
        with ExitStack() as stack:
            stack.enter_context(self.calls.installed())
            override = stack.enter_context(overridden())
            stack.enter_context(_calls_replaced(self._calls_of_pure))
            for compiled in self._compiled:
                compiled.install(override)
            for compiled in self._compiled:
                compiled.note_overrides()
            stack.enter_context(checkpoints_noted(self._checkpointed))
            stack.enter_context(arrays_seen(self))
            yield

    def patched(self) -> AbstractContextManager[None]:
        """While entered, for a whole run, recordings see what torch's classes do past modes."""
        return classes_patched(self)

    def _checkpointed(self, call: CheckpointCall) -> AbstractContextManager[None]:
        if self.infers:
            raise Unclear("it has checkpointed functions, which the compiler would follow")
        return nullcontext() if self.current is None else self.current.checkpointed(call)

    def note_as_written(self) -> None:
        """Warn, once for each line, that a compiled function, or a module in a hook, runs as it was written."""
        line = users_line()
        if line not in self._compiled_functions:
            self._compiled_functions.add(line)
            if self.warns:
                warnings.warn(
                    f"compiled code runs as it was written, not compiled ({line}): in a pipeline what runs compiled is "
                    f"a module on one stage, in steps",
                    stacklevel=2,
                )

    def result(
        self, function: Any, call: Call, specs: Sequence[TensorSpec], state: tuple[bool, bool, Any]
    ) -> Result | None:
        """What an operation gives; None where only the data tells."""
        key = (function, key_of(call.args), key_of(call.kwargs), tuple(specs), state, torch.get_default_dtype())
        if key not in self._results:
            if type(function) is CompiledCall:
                found = self.inference.result(function.inferred, call, specs)
                self._results[key] = found and replace(found, draws=function.num_draws)
            elif hasattr(function, "applies"):
                infer = partial(self.inference.result, function, call, specs)
                found, num_draws = inferred(function.applies, call, infer)
                self._results[key] = found and replace(found, draws=num_draws)
            else:
                self._results[key] = self.inference.result(function, call, specs)
        return self._results[key]


@contextmanager
def _calls_replaced(calls: Sequence[tuple[dict[str, Any], Callable[..., Any]]]) -> Iterator[None]:
    """While entered, modules are called otherwise, unless users have given them calls. There may be thousands."""
    for attributes, call in calls:
        attributes.setdefault("_call_impl", call)
    try:
        yield
    finally:
        for attributes, call in calls:
            if attributes.get("_call_impl") is call:
                del attributes["_call_impl"]
