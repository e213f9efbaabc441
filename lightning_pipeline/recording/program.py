"""Programs: a recorded step as one part for each visit of a stage, and what crosses between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.beginnings import Beginnings
from lightning_pipeline.recording.event import Event, checkpointed
from lightning_pipeline.recording.inference import writes_beside
from lightning_pipeline.recording.matcher import CAPTURED, EarlierValue
from lightning_pipeline.recording.repeated_uses import is_differentiable, passed_on

if TYPE_CHECKING:
    from lightning_pipeline.recording.sequence_cut import SequenceCut

VisitFunction = Callable[..., tuple[list[Tensor], list[Tensor]]]
"""(received, captured, module's tensors, seeding, batch) -> what goes on to the next visit, and what is kept."""


class Strand(NamedTuple):
    """Uses of a value on later visits, whose gradients come back as one.

    One process adds the gradients of a value's uses from the last to the first. Stages do so by themselves where a
    stage's own uses come before those of later stages. Where they do not, as with an auxiliary loss that is computed at
    the end of a step from what an early stage gave, the uses before it cross in strands of their own::

        uses, in order   stage 0: a   stage 1: b, c   stage 0: d   stage 1: e, f
        one process      ((((f + e) + d) + c) + b) + a
        strands          (f + e), then stage 0's own d, then c, then b, then stage 0's own a
    """

    value: int
    number: int


class Fork(NamedTuple):
    """Where a strand leaves its value: before an event of the visit, so that autograd comes to it after that one's."""

    before: int
    source: Strand | None
    strand: Strand


@dataclass
class VisitPlan:
    """What one visit does.

    Attributes:
        events: numbers of the path's events that run in it, in order.
        operands: for an event and a value that an earlier visit has made: the strand that it takes.
        forks: strands that leave before an event of the visit.
        receives: what comes from the visit before, but for the data of parameters, which is there.
        sends: what goes on to the next.
    """

    events: list[int] = field(default_factory=list)
    operands: dict[tuple[int, int], Strand] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    receives: list[Strand] = field(default_factory=list)
    sends: dict[Strand, Strand | None] = field(default_factory=dict)
    """With what each is here: a strand that came, or None for a value that is made here."""


class Region(NamedTuple):
    """A checkpointed function: where it begins, and whether computing it again may stop when all is there."""

    begins: int
    stops_early: bool


def regions_of(events: Sequence[Event]) -> dict[int, Region]:
    """The outermost checkpointed function of each event that is in one, by its number.

    One that takes gradients within is none: its tensors are kept, as the gradients need them before backward does.
    """
    found: dict[int, Region] = {}
    for begins, ends in checkpointed(events):
        if not any(event.function is torch.autograd.grad for event in events[begins:ends]):
            found.update(dict.fromkeys(range(begins + 1, ends), Region(begins, events[begins].call.args[0])))
    return found


class Program:
    """The events of a path, by visit.

    Args:
        specs: of the values that are given to it: the batch's tensors that not every rank has.
        before: the program of the path up to where micro-batches have met, of which this is what follows; of that,
            values may be carried over.
        num_stages: virtual stages.
        placement: the rank of each, so that gradients of what several of them use can be passed on; empty for not.

    Attributes:
        num_given: values that are given to it.
        begins: the first visit of the path that belongs to it. Visits of a program are counted from there.
        carried: values that were made before and are used, with their visit.
        carries_gradients: whether any of them gives gradients.
        specs, homes: of each value, and the visit that makes it. Parameters whose gradients pass from visit to visit
            (`repeated_uses`) count as values, with numbers below zero, which the first visit that uses them makes.
        functions: of visits, by number and the values that are kept, once they are made.
        gradient_strides: of what goes back from a visit, by its number and the loss's; the runtime's.
        regions: the outermost checkpointed function of each event that is in one, by the event's number.
        foreign: by visit, places among what is captured of values of earlier micro-batches; with the line that uses
            each, where it requires a gradient.
        leaves: places among what is captured of tensors that require gradients.
        comes_back: whether a value of an earlier micro-batch comes from another visit.
        writes_again: whether a region writes into tensors of the module, which it does again in backward.
        cut: how ranks that share a sequence run it, each on its part; None for whole. Set by the caller
            (`sequence_cut`).
        needs_order: whether a micro-batch has to be done with before the next one begins; set by the caller
            (`module_writes.needs_order`).
    """

    def __init__(
        self,
        end: Event,
        specs: Sequence[TensorSpec] = (),
        before: Program | None = None,
        num_stages: int = 1,
        placement: Sequence[int] = (),
    ) -> None:
        given = end
        while given.parent is not None:
            given = given.parent
        self.events = end.path()
        self.begins = 0
        if before is not None:
            self.events = self.events[len(before.events) :]
            first = min((event.visit for event in self.events if event.visit >= 0), default=0)
            self.begins = first // num_stages * num_stages
        self.digest = end.digest
        self.num_given = given.num_values
        self.specs: dict[int, TensorSpec] = dict(enumerate(specs))
        self.homes: dict[int, int] = dict.fromkeys(range(len(specs)), 0)
        self.functions: dict[tuple[int, tuple[int, ...]], VisitFunction] = {}
        self.gradient_strides: dict[tuple[int, int], Any] = {}
        self._wanted: dict[int, frozenset[int]] = {}
        self._returning: dict[tuple[int, int], list[Strand]] = {}
        last = max((event.visit for event in self.events), default=0)
        self.visits = [VisitPlan() for _ in range(1 + max(last - self.begins, 0))]
        self.carried: dict[int, int] = {}
        self.beginnings: Beginnings = Beginnings(self.num_given, None if before is None else before.beginnings)
        self.carries_gradients = False
        self.foreign: list[list[tuple[int, str]]] = [[] for _ in self.visits]
        self.leaves: list[int] = []
        self.comes_back = False
        self.needs_order = False
        self.cut: SequenceCut | None = None
        self.writes_again = False
        self.regions = regions_of(self.events)
        uses: dict[int, list[int]] = {}
        for number, (shared, first) in (passed_on(self.events, placement) if placement else {}).items():
            self.specs[-1 - number], self.homes[-1 - number] = shared, first - self.begins
        for number, event in enumerate(self.events):
            if event.visit < 0:
                continue
            visit = event.visit - self.begins
            self.visits[visit].events.append(number)
            if number in self.regions:
                written = [event.inputs[slot] for slot, _, _ in event.writes]
                self.writes_again |= any(type(value) is int and value < 0 for value in written)
            for slot, value in enumerate(event.inputs):
                if value is CAPTURED and event.specs[slot].requires_grad:
                    self.leaves.append(event.first_captured + event.matcher.captured_tensors[slot])
                if isinstance(value, EarlierValue):
                    place = event.first_captured + event.matcher.captured_tensors[slot]
                    self.foreign[visit].append((place, event.line if event.specs[slot].requires_grad else ""))
                    self.comes_back |= value.visit != event.visit
            differentiates = is_differentiable(event) or event.function is torch.autograd.grad
            for value, spec in dict(zip(event.inputs, event.specs, strict=True)).items():
                # A use for which the parameter was frozen takes the parameter itself, as no gradient comes from it.
                is_use = differentiates and spec.requires_grad
                if type(value) is int and (value >= 0 or (value in self.homes and is_use)):
                    uses.setdefault(value, []).append(number)
                    if before is not None and value not in self.homes:
                        self.homes[value] = self.carried[value] = before.homes[value] % num_stages
                        self.specs[value] = before.specs[value]
                    if value in self.carried and self.specs[value].requires_grad:
                        self.carries_gradients |= event.gives_gradients() or event.function is torch.autograd.grad
            for spec, value in (*zip(event.result.tensors, event.outputs, strict=True), *(w[1:] for w in event.writes)):
                if value is not None:
                    assert isinstance(spec, TensorSpec)
                    self.specs[value], self.homes[value] = spec, visit
            self.beginnings.note(event)
        for value, numbers in uses.items():
            if value in self.homes and any(self.visit_of(number) != self.homes[value] for number in numbers):
                self._spread(value, None, self.homes[value], numbers, [0])
        self._check_gradients()
        self._check_regions()

    @property
    def has_events(self) -> bool:
        return any(plan.events for plan in self.visits)

    def sent_spec(self, value: int) -> TensorSpec:
        """The spec of what goes from visit to visit: of this rank's part where the value is cut."""
        spec = None if self.cut is None else self.cut.specs.get(value)
        return spec or self.specs[value]

    def visit_of(self, number: int) -> int:
        """Of an event, counted from where the program begins."""
        return self.events[number].visit - self.begins

    def _check_gradients(self) -> None:
        """Gradients within a step with respect to what an earlier visit has made need all of its uses in one strand."""
        for plan in self.visits:
            for number in plan.events:
                event = self.events[number]
                if event.function is not torch.autograd.grad:
                    continue
                for (other, value), strand in plan.operands.items():
                    if other < number and plan.operands.get((number, value), strand) != strand:
                        raise NotImplementedError(
                            f"torch.autograd.grad with respect to what an earlier stage computes, which is also used "
                            f"on that stage later ({event.line}): clone it for the part that is differentiated"
                        )

    def _check_regions(self) -> None:
        """What a checkpointed function writes into the module, it writes again where it is computed again: on visits
        that gradients go back to."""
        writing: dict[tuple[Region, int], Event] = {}
        computed_again: set[tuple[Region, int]] = set()
        written: set[tuple[Region, int]] = set()  # values below zero
        for number, region in self.regions.items():
            event = self.events[number]
            into = [event.inputs[slot] for slot, _, _ in event.writes]
            into = [value for value in into if type(value) is int and value < 0]
            written.update((region, value) for value in into)
            if event.gives_gradients():
                computed_again.add((region, event.visit))
            elif into:
                writing.setdefault((region, event.visit), event)
        made_of_written: dict[tuple[Region, int], int] = {}  # values, with the visit that makes them
        for number, region in self.regions.items():
            event = self.events[number]
            beside = writes_beside(event.function, event.call)  # which it does not read for its results
            inputs = [value for slot, value in enumerate(event.inputs) if slot not in beside]
            places = [(region, value) for value in inputs if type(value) is int]
            visits = [made_of_written.get(place, event.visit if place in written else -1) for place in places]
            if (region, event.visit) in computed_again and any(visit not in (-1, event.visit) for visit in visits):
                raise NotImplementedError(
                    f"a checkpointed function writes into the module, and computes with that on a stage from where "
                    f"another one goes on ({event.line}), which would not compute it again in backward: do without the "
                    f"checkpoint, or write outside of it"
                )
            if any(visit >= 0 for visit in visits):
                made_of_written.update(((region, value), event.visit) for value in event.made())
        regions = {region for region, _ in computed_again}
        for place, event in writing.items():
            if place not in computed_again and place[0] in regions:
                raise NotImplementedError(
                    f"a checkpointed function writes into the module ({event.line}) on a stage that computes nothing "
                    f"else of it, and would not again in backward, as it does in one process: do without the "
                    f"checkpoint, or write outside of it"
                )

    def with_gradients(self, loss: int) -> frozenset[int]:
        """Values, and parameters (below zero), from which the loss is computed in a way that autograd goes back."""
        found = self._wanted.get(loss)
        if found is None:
            found = self._wanted[loss] = self._before([loss])
        return found

    def crossing(self, values: Sequence[int]) -> list[tuple[int, Strand]]:
        """What goes from visit to visit, to be made into these values in a way that autograd goes back: the visit that
        receives it, and the strand."""
        wanted = self._before(values)
        return [
            (visit, strand)
            for visit, plan in enumerate(self.visits)
            for strand in plan.receives
            if strand.value in wanted and self._is_wanted(strand, visit, wanted)
        ]

    def _before(self, values: Iterable[int]) -> frozenset[int]:
        """Values and parameters from which some are computed in a way that autograd goes back, and these."""
        wanted = {value for value in values if self.specs[value].requires_grad}
        for event in reversed(self.events):
            if any(value in wanted for value in event.made()):
                for slot, (value, spec) in enumerate(zip(event.inputs, event.specs, strict=True)):
                    is_giver = type(value) is int and self.specs.get(value, spec).requires_grad
                    if is_giver and event.gives_gradient_to(slot, wanted):
                        wanted.add(value)
        return frozenset(wanted)

    def returning(self, visit: int, loss: int) -> list[Strand]:
        """What the visit receives and gives gradients of, in the order in which they go back; without a loss, none."""
        if loss < 0:
            return []
        wanted = self.with_gradients(loss)
        found = self._returning.get((visit, loss))
        if found is None:
            found = []
            for strand in self.visits[visit].receives if visit < len(self.visits) else ():
                if strand.value in wanted and self._is_wanted(strand, visit, wanted):
                    found.append(strand)
            self._returning[visit, loss] = found
        return found

    def _is_wanted(self, strand: Strand, visit: int, wanted: frozenset[int]) -> bool:
        """Whether a strand that comes to a visit is used, there or later, in what the loss is computed from."""
        return any(event.gives_gradient_of(strand.value, wanted) for event in self.users(strand, visit))

    def users(self, strand: Strand, visit: int) -> Iterator[Event]:
        """The events that use a strand that comes to a visit, there or later."""
        plan = self.visits[visit]
        for (number, value), used in plan.operands.items():
            if used == strand and value == strand.value:
                yield self.events[number]
        sent = [strand_out for strand_out, source in plan.sends.items() if source == strand]
        sent += [fork.strand for fork in plan.forks if fork.source == strand]
        for one in dict.fromkeys(sent):
            yield from self.users(one, visit + 1)

    def _spread(self, value: int, strand: Strand | None, visit: int, uses: Sequence[int], count: list[int]) -> None:
        """Plan how a value, which is on `visit` as `strand`, comes to the events that use it."""
        here = self.visits[visit]
        own = [number for number in uses if self.visit_of(number) == visit]
        later = [number for number in uses if self.visit_of(number) != visit]
        if strand is not None:
            here.operands.update({(number, value): strand for number in own})
        last = max(own, default=-1) if self.specs[value].requires_grad else -1
        together = [number for number in later if number > last]
        apart = [[number] for number in later if number < last]
        for group in (*apart, together):
            if not group:
                continue
            is_fork = group is not together
            sent = strand
            if is_fork or sent is None or apart:
                sent = Strand(value, count[0])
                count[0] += 1
            if is_fork:
                here.forks.append(Fork(next(number for number in own if number > group[0]), strand, sent))
            here.sends[sent] = sent if is_fork else strand
            self.visits[visit + 1].receives.append(sent)
            self._spread(value, sent, visit + 1, group, count)
