"""What a hand-optimized step changes by itself in weights, or computes from weights, and from nothing of its batch.

Target networks follow a model in such steps, weights are clamped, spectral norms iterate. One process does so once for
its batch, so the first micro-batch does it, and the others go on with what it has made::

    micro-batch 0   loss(x) |                | target.lerp_(model, 0.01)   loss(x)
    micro-batch 1   loss(x) | backward, step | (is made)                   loss(x)

Where a step has looked at a tensor since its micro-batches last met, they meet before it is changed, as the others
would look at it too late. What depends on the batch is changed by each micro-batch. So are buffers of which a step
computes with nothing but buffers and numbers, which may count samples: ``self.seen += len(x)``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name
from lightning_pipeline.partition.users_code import is_in_package, users_line
from lightning_pipeline.recording.event import CHANGE_IS_MADE, MICROBATCHES_MEET, OWN_CHANGE, Event
from lightning_pipeline.recording.inference import writes_beside
from lightning_pipeline.recording.matcher import CAPTURED
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.operation import take_apart
from lightning_pipeline.recording.path import mark
from lightning_pipeline.recording.step_gradients import UNANSWERED, written
from lightning_pipeline.recording.views import Memory

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording

Agree = Callable[[str, bool], bool]
"""Has all micro-batches come to a change of this name: they wait there for one another, or are compared where they next
do. Gives whether a step runs."""

_WITH_DATA = frozenset((FunctionKind.COMPUTES, FunctionKind.READS, FunctionKind.WRITES, FunctionKind.DRAWS))


class _Change(NamedTuple):
    what: str  # name of the call, with its numbers and line
    numbers: tuple[int, ...]  # of the module's tensors that it writes into
    is_seen: bool  # the step has looked at one of them since its micro-batches last met


class OwnChanges:
    """Finds and makes the changes of one micro-batch, whose calls run directly.

    Args:
        tensors: the module's.
        is_first: whether the micro-batch makes the changes.

    Attributes:
        is_making: the running call is one.
    """

    def __init__(self, tensors: ModuleTensors, agree: Agree, *, is_first: bool) -> None:
        self.is_making = False
        self._is_first, self._agree = is_first, agree
        self._tensors = tensors
        self._numbers = {memory_of(tensor): number for number, tensor in enumerate(tensors.tensors)}
        # Tensors that are computed from the module's alone, with whether from any parameter:
        self._free: Any = WeakIdKeyDictionary()
        # Of the module's tensors, by number, since micro-batches last met:
        self._seen: set[int] = set()
        self._changed: set[int] = set()  # by each micro-batch

    def met(self) -> None:
        """Micro-batches have met."""
        self._seen.clear()
        self._changed.clear()

    def note_free(self, tensor: Tensor) -> None:
        """Take note of what the batch has computed, and no micro-batch: a gradient."""
        self._free[tensor] = True

    def note(self, func: Any, kind: FunctionKind, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        """Take note of a call and of what it has given."""
        if kind not in _WITH_DATA or self.is_making:
            return
        used, made = tree.leaves((args, kwargs)), tree.leaves(found)
        weights = list(map(self._weights, used))
        if used and kind is not FunctionKind.DRAWS and None not in weights:
            for tensor in made:
                self._free[tensor] = any(weights)
        numbers = {memory: self._behind(tensor) for tensor in used for memory in (memory_of(tensor),)}
        targets = [*written(func, kind, args, kwargs), *_written_beside(func, args, kwargs)]
        self._changed |= _known(map(self._behind, targets))
        if targets or not made or any(numbers.get(memory_of(tensor)) is None for tensor in made):  # or it makes views
            self._seen |= _known(numbers.values())

    def make(self, func: Any, kind: FunctionKind, args: Any, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Make a change once for all micro-batches, if the call is one.

        Args:
            call: makes it.

        Returns:
            What it gives, or `UNANSWERED` for other calls.

        Raises:
            RuntimeError: the micro-batches do not make the same changes.
        """
        if self.is_making or not (kind is FunctionKind.WRITES or "out" in kwargs):
            return UNANSWERED
        change = self._find(func, kind, args, kwargs)
        if change is None or not self._agree(change.what, change.is_seen):
            return UNANSWERED
        self._note_change(change)
        if not self._is_first:
            return result_of_write(func, args, kwargs)
        self.is_making = True
        try:
            return call()
        finally:
            self.is_making = False

    def _find(self, func: Any, kind: FunctionKind, args: Any, kwargs: dict[str, Any]) -> _Change | None:
        name = function_name(func)
        targets = written(func, kind, args, kwargs)
        numbers = [self._behind(tensor) for tensor in targets]
        if not numbers or None in numbers:
            return None
        weights = list(map(self._weights, tree.leaves((args, kwargs))))
        if None in weights:
            return None
        found = tuple(number for number in numbers if number is not None)
        is_of_weights = not any(map(self._tensors.is_buffer.__getitem__, found)) or any(weights)
        if not is_of_weights and not _is_torchs_average():
            return None
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, (bool, int, float))]
        several = f" and {len(found) - 1} more" if len(found) > 1 else ""
        call = f"{name}({', '.join(map(str, given))})"
        what = f"the change of {self._tensors.names[found[0]][0]}{several} by {call} ({users_line()})"
        return _Change(what, found, not self._seen.isdisjoint(found))

    def _note_change(self, change: _Change) -> None:
        """Take note of a change that is now made."""

    def _behind(self, tensor: Tensor) -> int | None:
        """The number of the module's tensor that a tensor is, or shares memory with."""
        memory = memory_of(tensor)
        number = self._numbers.get(memory)
        return number if number is None or memory_of(self._tensors.tensors[number]) == memory else None

    def _weights(self, tensor: Tensor) -> bool | None:
        """Whether a tensor is a parameter or its gradient, or is computed from one; None if it is not the same for all
        micro-batches, which it is if it is computed from nothing of the batch."""
        number = self._behind(tensor)
        if number is None:
            return self._free.get(tensor)
        return None if number in self._changed else not self._tensors.is_buffer[number]


class OwnChangesOnPath(OwnChanges):
    """The same where calls are recorded, most of which follow a known path. Notes those that all ranks compute."""

    def __init__(self, recording: Recording, agree: Agree, *, is_first: bool) -> None:
        super().__init__(recording.tensors, agree, is_first=is_first)
        self._recording = recording
        self._end = recording.beginning
        self._memory = Memory()
        self._free_values: dict[int, bool] = {}
        self._seen_on_path: set[int] = set()
        self._changed_on_path: set[int] = set()

    def _find(self, func: Any, kind: FunctionKind, args: Any, kwargs: dict[str, Any]) -> _Change | None:
        self._follow_path()
        change = super()._find(func, kind, args, kwargs)
        if change is None:
            return None
        return change._replace(is_seen=change.is_seen or not self._seen_on_path.isdisjoint(change.numbers))

    def _note_change(self, change: _Change) -> None:
        mark(self._recording, OWN_CHANGE if self._is_first else CHANGE_IS_MADE, *change.numbers)

    def _behind(self, tensor: Tensor) -> int | None:
        value = self._value_of(tensor)
        return super()._behind(tensor) if value is None else self._memory.module_tensor(value)

    def _weights(self, tensor: Tensor) -> bool | None:
        number, value = self._behind(tensor), self._value_of(tensor)
        if number in self._changed_on_path:
            return None
        return super()._weights(tensor) if number is not None or value is None else self._free_values.get(value)

    def _value_of(self, tensor: Tensor) -> int | None:
        number = self._tensors.number_of(tensor)
        return self._recording.value_of(tensor) if number is None else -1 - number

    def _follow_path(self) -> None:
        """Take in the events that have come since."""
        events: list[Event] = []
        event = self._recording.event
        while event is not self._end:
            events.append(event)
            assert event.parent is not None
            event = event.parent
        self._end = self._recording.event
        announced: Sequence[int] = ()
        for event in reversed(events):
            if event.function is MICROBATCHES_MEET:
                self._seen_on_path, self._changed_on_path = set(), set()
            elif event.function is OWN_CHANGE:
                announced = event.call.args
            elif event.visit >= 0:
                self._take_in(event, announced)

    def _take_in(self, event: Event, announced: Sequence[int]) -> None:
        numbers = {self._memory.module_tensor(value) for value in event.inputs}
        captured = range(event.first_captured, event.num_captured)
        weights = [*map(self._weights_of, event.inputs), *map(self._weights_here, captured)]
        is_free = None not in weights and not event.draws
        changed = self._memory.note(event).keys()
        if is_free:
            self._free_values.update(dict.fromkeys(event.made(), any(weights)))
        if is_free and changed and changed <= set(announced):
            return
        self._changed_on_path |= changed
        if changed or not all(event.result.shares):  # or it makes views
            self._seen_on_path |= _known(numbers)

    def _weights_of(self, operand: Any) -> bool | None:
        """Likewise, of an operand of an event."""
        number = self._memory.module_tensor(operand)
        if number is not None:
            return None if number in self._changed_on_path else not self._tensors.is_buffer[number]
        return False if operand is CAPTURED else self._free_values.get(operand)

    def _weights_here(self, place: int) -> bool | None:
        """Likewise, of what has been captured."""
        found = self._recording.copied_from.get(place, self._recording.captured[place])
        return self._weights(found) if isinstance(found, Tensor) else False


def _known(numbers: Any) -> set[int]:
    return {number for number in numbers if number is not None}


def _written_beside(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The running statistics that batch norms write into."""
    if not function_name(func).endswith("_norm"):
        return []
    call = take_apart(func, args, kwargs)
    return [call.tensors[slot] for slot in writes_beside(func, call)]


def result_of_write(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a call gives that writes into a tensor."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = function_name(func)
    return None if name.startswith("_foreach_") or name in ("data.__set__", "__setitem__") else args[0]


def _is_torchs_average() -> bool:
    """Whether torch's `AveragedModel` counts its updates, to which it gives weights by the count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_in_package(frame):
        frame = frame.f_back
    return frame is not None and frame.f_code is AveragedModel.update_parameters.__code__
