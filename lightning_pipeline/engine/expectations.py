"""Predicts what a step will read, so that reading steps need not run micro-batch by micro-batch.

After a read such as ``loss.item()``, the step's Python may depend on the value, so it cannot run ahead of the stages as
it usually does. Once a step has read a value, later steps of its kind are expected to run the same events, and the
stages run these before the Python::

    without reads     Python 0, F0    Python 1, F1    ...    B0             B1
    with reads        F0              F1              ...    Python 0, B0   Python 1, B1

The Python gets the computed value if it reaches the read through the expected events, with the same captured inputs. A
micro-batch runs backward once its Python has ended as expected. A wrong expectation costs only time: all ranks notice
it at the same point. They finish the remaining forwards of this and later micro-batches without computing, so that
every message sent is received, restore the module's tensors, and run the rest of the step in order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.provenance import Constant, Origin
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.recording.views import Memory

_MISSED = -10
_GIVEN_UP = -25
_AT_MOST = 20
"""Scores of a kind of step: +1 for a hit, up to `_AT_MOST`; `_MISSED` for a miss; given up below `_GIVEN_UP`."""


@dataclass
class Expectation:
    """How the step of a kind of micro-batch is expected to run.

    Attributes:
        path: the events from the beginning to the end, both included.
        origins: how to make the tensors and numbers that the events capture.
        loss_value: number of the loss; -1 for none.
        asked: values that are needed after the step.
        written: by visit, numbers of the module's tensors that the program modifies in place.
    """

    program: Program
    end: Event
    path: frozenset[Event]
    origins: list[Origin]
    loss_value: int
    asked: tuple[int, ...]
    reads: tuple[int, ...]
    module_reads: tuple[int, ...]
    written: list[list[int]]

    def specs_of(self, values: Sequence[int]) -> list[TensorSpec]:
        return [self.program.specs[value] for value in values]

    @cached_property
    def reads_by_visit(self) -> dict[int, list[int]]:
        """The values that are read, by the visit that computes them."""
        found: dict[int, list[int]] = {}
        for value in self.reads:
            found.setdefault(self.program.homes[value], []).append(value)
        return found


@dataclass
class Expectations:
    """Expectations and scores, by the event at which the paths of a kind begin."""

    _known: dict[Event, Expectation] = field(default_factory=dict)
    _scores: dict[Event, int] = field(default_factory=dict)

    def of(self, beginning: Event) -> Expectation | None:
        return self._known.get(beginning)

    def wants(self, beginning: Event) -> bool:
        """Whether a recording should track the provenance of its captures, so that an expectation can be learned."""
        return beginning in self._scores and beginning not in self._known and not self.has_given_up(beginning)

    def has_given_up(self, beginning: Event) -> bool:
        """Whether steps of this kind have differed too often to be predicted."""
        return self._scores.get(beginning, 0) < _GIVEN_UP

    def keep(self, beginnings: Collection[Event]) -> None:
        """Forget all kinds other than these."""
        for beginning in [one for one in self._scores if one not in beginnings]:
            del self._scores[beginning]
            self._known.pop(beginning, None)

    def forget(self) -> None:
        """Forget everything, as ranks hold different tensors now."""
        self._known.clear()
        self._scores.clear()

    def note_hit(self, beginning: Event) -> None:
        self._scores[beginning] = min(self._scores[beginning] + 1, _AT_MOST)

    def note_miss(self, beginning: Event) -> None:
        self._known.pop(beginning, None)
        self._scores[beginning] = self._scores.get(beginning, 0) + _MISSED

    def learn(
        self,
        beginning: Event,
        recording: Recording,
        program: Program,
        *,
        can_run_ahead: bool,
        loss_value: int,
        asked: Sequence[int],
    ) -> None:
        """Learn from a micro-batch whose step read values.

        Args:
            can_run_ahead: whether its program can run before the Python.
        """
        self._scores.setdefault(beginning, 0)
        if not self.wants(beginning):
            return
        if not can_run_ahead or not _can_be_taken_back(program, recording.reads):
            self._scores[beginning] = 10 * _MISSED
            return
        if recording.provenance is None:
            return  # the next recording tracks it
        origins = _origins(recording)
        if origins is None:
            self.note_miss(beginning)
            return
        self._known[beginning] = Expectation(
            program=program,
            end=recording.event,
            path=frozenset([beginning, *program.events]),
            origins=origins,
            loss_value=loss_value,
            asked=tuple(dict.fromkeys([*asked, *recording.reads])),
            reads=tuple(dict.fromkeys(recording.reads)),
            module_reads=tuple(dict.fromkeys(recording.module_reads)),
            written=_written(program),
        )


def _written(program: Program) -> list[list[int]]:
    """By visit, numbers of the module's tensors that a program modifies in place."""
    memory = Memory()
    found: list[dict[int, None]] = [{} for _ in program.visits]
    for event in program.events:
        if event.visit >= 0:
            found[event.visit].update(dict.fromkeys(memory.note(event)))
    return [list(numbers) for numbers in found]


def _origins(recording: Recording) -> list[Origin] | None:
    """The origin of each tensor and number that a recording captured; None if any is unknown."""
    provenance = recording.provenance
    if provenance is None or not provenance.is_known or recording.overwritten:
        return None
    found: list[Origin] = []
    for place, content in enumerate(recording.captured):
        if place in provenance.captured:
            found.append(provenance.captured[place])
        elif isinstance(content, (int, float, complex)):
            found.append(Constant(content))
        else:
            return None
    return found


def _can_be_taken_back(program: Program, reads: Sequence[int]) -> bool:
    """Whether a run of the program can be undone, and leaves the values that are read unchanged.

    It may only make new tensors and modify the module's tensors in place.
    """
    if program.leaves or any(program.foreign):
        return False
    memory = Memory()
    written: set[object] = set()
    for event in program.events:
        if event.visit < 0:
            continue
        if hasattr(event.function, "applies") or any(memory.note(event).values()):
            return False
        written.update(memory.of(value) for _, _, value in event.writes)
    is_batch_written = any(isinstance(first, int) and 0 <= first < program.num_given for first in written)
    return not is_batch_written and all(memory.of(value) not in written for value in reads)
