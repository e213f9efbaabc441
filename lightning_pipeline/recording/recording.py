"""Recordings: the user's step runs once per micro-batch on placeholders, and its torch calls become events.

Each call is looked up among those that have followed the same calls before (`Event.children`). A known one is answered
by generated code that compares the arguments and hands out a placeholder, which is used again; an unknown one is
inferred on fake tensors and becomes a new child::

    beginning ── embedding ── linear ── relu ── cross_entropy      the step, as ever
                                    └── dropout ── relu ── ...     from epoch 3 on

What every rank has (the batch's small tensors, numbers, masks made of them) is computed on every rank (`everywhere`).
Events *capture* it, and ranks compare their captures at the end of the step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline import _torch
from lightning_pipeline.partition.compiled import compiled_as_written
from lightning_pipeline.partition.gradient_hooks import Handle, Hook
from lightning_pipeline.partition.memory import copied, memory_of
from lightning_pipeline.partition.ownership import HELD_BY, absent_state_expected, holders_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, become, placeholder
from lightning_pipeline.partition.users_code import is_refusal, users_line
from lightning_pipeline.recording import process_flags
from lightning_pipeline.recording.checkpoints import Checkpoints
from lightning_pipeline.recording.event import MICROBATCHES_MEET, Event
from lightning_pipeline.recording.everywhere import Constants
from lightning_pipeline.recording.inference import written_by_array
from lightning_pipeline.recording.kept_views import KeptView, refuse_written
from lightning_pipeline.recording.matcher import CAPTURED, UNLIKE, EarlierValue, HookTensor
from lightning_pipeline.recording.own_changes import OwnChangesOnPath
from lightning_pipeline.recording.path import mark
from lightning_pipeline.recording.placing import Placing
from lightning_pipeline.recording.provenance import Provenance
from lightning_pipeline.recording.python_again import CheckpointCall
from lightning_pipeline.recording.recorder import Reads, Recorder
from lightning_pipeline.recording.replicated_memory import ReplicatedMemory
from lightning_pipeline.recording.split_modules import split_calls_seen
from lightning_pipeline.recording.step_gradients import StepGradients
from lightning_pipeline.recording.unknown_calls import follow_unknown

_NO_CHANGES = nullcontext()


class Recording(TorchFunctionMode):
    """The recording of one micro-batch's step.

    Args:
        data_source: brings the data that the step's Python asks for.

    Attributes:
        event: the last event so far.
        captured: tensors and numbers that events have captured.
        seeds: seeds of the user's own generators that were drawn from.
        overwritten: ids of captured tensors that a stage writes into, which may have been uninitialized.
        of_stages: ids of captured values of earlier micro-batches, which only the ranks of their stages have.
        kept: placeholders that are in no event's pool, which the user's code may refer to.
        hooks: hooks on gradients of its values, in order of registration.
        with_hooks: events that take gradients which pass hooks.
        changes: finds what the step changes once for all its micro-batches; None if there are no others.
        is_simple: whether the micro-batch can run by the schedule, apart from its reads.
        module_reads: the module's tensors that were read and that not every rank holds, by number.
        provenance: traces where captures come from; None if that is not needed.
        delivered: tensors of the batch that every rank has.
        batch_places: placeholders for tensors of the batch that only the first rank has.
        overlapping: the numbers of those that share memory with others of them.
        skipped: the last event of each call that was answered as a whole, with the event before the call and those
            that made its results.
        num_aside: number of torch functions that were no events, except those that describe tensors.
        counted: tensors of the module that every rank has increased by one.
        constants: what the call of a module that only computes makes of numbers alone; None outside of one.
        num_modes: depth of torch's stack of function modes while only this one is on top.
        arrays: arrays that share memory with values in one process, with their last contents.
        copied_from: of captured copies, by place, the tensors whose memory they are copies of.
        outdated: likewise what is in that memory now, where it is something else.
        rank_asked_at: the code and lines of the user's that have asked for the rank.
        flags: those of the process, as the step has set them; None if it has set none.
        replay: runs a checkpointed function again now.
        switched: tensors of the module whose gradients the step has switched on or off, by number, and whether they
            required them where stages have come to.
        twins: placeholders of values that the user's code has other ones of, too.
        moved_leaves: leaves of the user's that a stage writes into, what gathers their gradients now, and did before.
        kept_views: after the step, views among what the user's code refers to.
    """

    def __init__(
        self, recorder: Recorder, beginning: Event, data_source: Reads, seed_draw: Callable[[int], None]
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.event = self.beginning = beginning
        self.captured: list[Any] = []
        self.seeds: list[int] = []
        self.overwritten: set[int] = set()
        self.of_stages: set[int] = set()
        self.num_draws = self.num_aside = self.num_modes = 0
        self.is_simple = not recorder.has_hooks
        self.reads: list[int] = []
        self.module_reads: list[int] = []
        self.provenance: Provenance | None = None
        self.kept: list[Placeholder] = []
        self._is_over = False
        self.data_source = data_source
        self.seed_draw = seed_draw
        self._placing: Placing | None = None
        self.tensors = recorder.tensors
        self.hooks: list[Hook] = []
        self.with_hooks: set[Event] = set()
        self.retained: list[tuple[int, Placeholder]] = []
        self.has_run_backward = False
        self.gradients = StepGradients()
        self.changes: OwnChangesOnPath | None = None
        self.checkpoints = Checkpoints()
        changing = recorder.changing.items()
        self.memory = ReplicatedMemory(frozenset(place for place, tensor in changing if memory_of(tensor) == place))
        self.delivered: list[Tensor] = []
        self.batch_places: list[weakref.ref[Placeholder]] = []
        self.overlapping: Collection[int] = ()
        recorder.recordings.append(self)
        self.counted: list[Tensor] = []
        self.constants: Constants | None = None
        self.arrays: list[tuple[Any, bytes, Placeholder]] = []
        self.skipped: dict[Event, tuple[Event, frozenset[Event]]] = {}
        self.copied_from: dict[int, Tensor] = {}
        self.outdated: dict[int, Tensor] = {}
        self.rank_asked_at: set[tuple[CodeType, int]] = set()
        self.flags: process_flags.Flags | None = None
        self.replay: Any = None
        self.switched: dict[int, bool] = {}
        self.twins: list[Placeholder] = []
        self.kept_views: list[KeptView] = []
        self.refused: NotImplementedError | None = None
        self.moved_leaves: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for child in self.event.children:
            result = child.match(func, args, kwargs, self)
            if result is not UNLIKE:
                self.event = child
                return result
        try:
            return follow_unknown(self, func, args, kwargs or {})
        except NotImplementedError as error:
            if is_refusal(error):
                self.refused = error
            raise

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the user's step while entered."""
        with self.resumed(), absent_state_expected(), self:
            self.num_modes = _torch.num_function_modes()
            try:
                yield
                process_flags.refuse_left(self.flags)
            finally:
                if self.refused is not None:  # by code that goes on, or fails, as it would not in one process
                    raise self.refused
        self.note_written_arrays()
        self.note_outdated()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Make this the current recording of the process, while the user's step or a part of it runs."""
        self.recorder.current = self
        calls = self.tensors.split_calls
        try:
            with split_calls_seen(calls) if calls else _NO_CHANGES, compiled_as_written(self.recorder.note_as_written):
                yield
        finally:
            self.recorder.current = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Record what the running thread calls, while entered."""
        with absent_state_expected(), self:
            self.num_modes = _torch.num_function_modes()
            yield
        self.note_written_arrays()

    def meet(self, what: str, loss: Tensor | None = None) -> int:
        """Mark a synchronization point of the micro-batches. Gives the value that backward starts from; -1 for none."""
        self.note_written_arrays()
        self.note_outdated()
        if self.changes is not None:
            self.changes.met()
        value = self.value_of(loss)
        self.has_run_backward |= loss is not None
        mark(self, MICROBATCHES_MEET, what, -1 if value is None else value)
        return -1 if value is None else value

    def value_of(self, tensor: Any) -> int | None:
        """The number of the value that a tensor stands for; None for other tensors."""
        return tensor._pl_value if type(tensor) is Placeholder and tensor._pl_recording is self else None

    def home_of(self, value: int) -> int:
        """The visit that makes a value, once the path has ended."""
        program = self.event.program
        assert program is not None
        return program.homes[value]

    def placeholder_for(self, value: int, spec: TensorSpec, what: str) -> Placeholder:
        made = placeholder(spec, what)
        made._pl_value, made._pl_recording = value, self
        return made

    def watch_array(self, array: Any, content: bytes, place: Placeholder) -> None:
        """Watch an array that shares its memory with a value in one process."""
        self.arrays.append((array, content, place))
        self._watch()

    def choose_flags(self, flags: process_flags.Flags) -> None:
        """Have the calls that follow run with these flags."""
        self.flags = flags
        self._watch()

    def _watch(self) -> None:
        """See each call before it is looked up."""
        self.__class__ = _Watching
        self.num_modes = -1

    def record(self, func: Any, args: Any) -> Any:
        """Record a call that the user's code has not made itself."""
        return Recording.__torch_function__(self, func, (), args)

    def note_written_arrays(self) -> None:
        """Have stages follow what was written into arrays that share memory with their values in one process."""
        arrays, self.arrays = self.arrays, []
        while arrays:
            array, before, place = arrays.pop()
            now = array.tobytes()
            if now != before:
                with _torch.DisableTorchFunction():
                    content = torch.tensor(array)
                self.record(written_by_array, (place, content))
            if sys.getrefcount(array) > 2:  # this variable's and the call's
                self.arrays.append((array, now, place))

    def let_go(self) -> None:
        """Release tensors after the step: pooled placeholders refer to the recording for a long time."""
        self.captured, self.kept, self.copied_from, self.twins, self.kept_views = [], [], {}, [], []
        self.checkpoints.changing_calls = []
        self._is_over = True

    # -- called by generated matchers --------------------------------------------------------------------------------

    def capture(self, tensor: Tensor) -> None:
        if self.provenance is not None:
            self.provenance.note_captured(len(self.captured), tensor)
        self.captured.append(tensor)
        memory = self.memory
        if (memory.exposed or memory.copied) and memory_of(tensor) in (memory.exposed | memory.copied):
            self.copy_captured(len(self.captured) - 1)

    def copy_captured(self, place: int) -> None:
        """Take along a copy of what has been captured, as the step's Python writes into its memory."""
        tensor = self.captured[place]
        with _torch.DisableTorchFunction():
            self.captured[place] = tensor.clone() if tensor.requires_grad else copied(tensor)
        self.copied_from[place] = tensor

    def note_outdated(self) -> None:
        """Take note of what has been written into memory of which copies were captured.

        Where autograd does not hear of a write, as by NumPy or ``.data``, a backward in one process computes with it.
        """
        with _torch.DisableTorchFunction():
            for place, tensor in self.copied_from.items():
                if type(tensor) is not Placeholder and not torch.equal(tensor, self.captured[place]):
                    self.outdated[place] = copied(tensor)

    def note_draw(self) -> None:
        self.captured.append(self.num_draws)
        self.num_draws += 1

    def note_draws_within(self, function: Any) -> None:
        """A function of the user's has been called, which may draw more than once."""
        event = self.event
        if event.parent is not None and event.function is function and event.result.draws > 1:
            self.num_draws += event.result.draws - 1
            self.num_aside += 1  # a call with it is not answered as a whole

    def keep(self, place: Placeholder) -> None:
        if not self._is_over:
            self.kept.append(place)

    def change(self, place: Placeholder, spec: TensorSpec) -> None:
        value = place._pl_value
        become(place, placeholder(spec, place._pl_what))
        place._pl_value, place._pl_recording = value, self

    def adopt(self, place: Placeholder, spec: TensorSpec, value: int) -> None:
        """Make an earlier micro-batch's value, which the step has written into, a value of this recording."""
        refuse_written(place._pl_recording, place)
        if spec is not place._pl_spec:
            become(place, placeholder(spec, place._pl_what))
        place._pl_value, place._pl_recording = value, self
        self.kept.append(place)

    def register(
        self, how: Callable[[Tensor, Hook], None], tensor: Placeholder, function: Callable[..., Any]
    ) -> Handle:
        self.is_simple = False
        hook = Hook(function, len(self.hooks))
        self.hooks.append(hook)
        self.__torch_function__(how, (), (tensor, hook))
        return Handle(hook)

    # -- marks and inputs -------------------------------------------------------------------------------------------

    @contextmanager
    def checkpointed(self, call: CheckpointCall) -> Iterator[None]:
        if self.replay is not None:
            self.replay.enter_checkpoint()
            yield
            return
        with self.checkpoints.entered(self, call):
            yield

    @property
    def is_in_checkpoint(self) -> bool:
        return self.checkpoints.depth > 0 or self.replay is not None

    def note_in_checkpoint(self, event: Event) -> None:
        """Take note of a new event of a checkpointed function."""
        if self.checkpoints.note(event, self.recorder.num_stages):
            self._placing = None

    @property
    def placing(self) -> Placing:
        """Where the events so far run."""
        if self._placing is None or self._placing.end is not self.event:
            self._placing = Placing(self.recorder.num_stages, self.tensors, self.event)
        return self._placing

    def is_ours(self, values: Any, depth: int = 0) -> bool:
        """Whether arguments contain a value of a stage, or a tensor that only some ranks hold."""
        for value in values:
            if type(value) is Placeholder:
                return True
            if isinstance(value, Tensor):
                number = self.tensors.number_of(value)
                if HELD_BY in value.__dict__ if number is None else not self.tensors.is_replicated(number):
                    return True
            elif type(value) in (list, tuple) and depth < 3:
                if self.is_ours(value, depth + 1):
                    return True
            elif type(value) is dict and depth < 3 and self.is_ours(value.values(), depth + 1):
                return True
        return False

    def input_of(self, tensor: Tensor) -> int | HookTensor | EarlierValue | None:
        number = self.tensors.number_of(tensor)
        if number is not None:
            is_copied = self.tensors.is_replicated(number) and memory_of(tensor) in self.memory.copied
            return CAPTURED if is_copied else -1 - number
        if type(tensor) is Placeholder and tensor._pl_recording is self:
            return tensor._pl_value
        ranks = holders_of(tensor)
        if ranks is not None:
            if tensor.requires_grad and torch.is_grad_enabled():
                raise NotImplementedError(
                    f"a tensor that was made in a hook of what one stage holds requires a gradient, and is used in a "
                    f"step ({users_line()}): make it a parameter of the module, or detach it"
                )
            return self.recorder.held(ranks)
        if type(tensor) is Placeholder:
            if tensor._pl_recording is None:
                raise NotImplementedError(
                    f"{tensor._pl_what} is not on this rank, and is used in a step ({users_line()}): make it a "
                    f"parameter or buffer of the module"
                )
            return EarlierValue(tensor._pl_recording.home_of(tensor._pl_value))
        return CAPTURED


class _Watching(Recording):
    """A recording whose user has taken arrays that share memory with values, or has set flags of the process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note_written_arrays()
        return Recording.__torch_function__(self, process_flags.with_flags(func, self.flags), types, args, kwargs)
