"""Derives costs from a run's recorded times, so that other schedules can be simulated with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from lightning_pipeline.schedules.schedule import Action, Kind, Schedule
from lightning_pipeline.schedules.simulation import Simulation, needs, simulate
from lightning_pipeline.schedules.timeline import Timeline
from lightning_pipeline.schedules.validation import ScheduleError

_BACKWARD = (Kind.B, Kind.I)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_SENT_BY = {Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.I}


@dataclass(frozen=True)
class Costs:
    """What the actions of each virtual stage take, in seconds.

    Attributes:
        forward: time of F, one number for each virtual stage.
        input_grad: time of I, likewise.
        weight_grad: time of W, likewise.
        transfer: from the end of a computation to the moment its value is there on another rank.
        backward: time of B, which may be less than I and W take together; their sum where no B was seen.
    """

    forward: list[float]
    input_grad: list[float]
    weight_grad: list[float]
    transfer: float
    backward: list[float]

    def simulate(self, schedule: Schedule) -> Simulation:
        """What `schedule` would do with these costs: the stages that it does not split take `backward`."""
        split = {action.stage for order in schedule.orders for action in order if action.kind is Kind.I}
        input_grad, weight_grad = list(self.input_grad), list(self.weight_grad)
        for stage in set(range(schedule.num_stages)) - split:
            input_grad[stage], weight_grad[stage] = self.backward[stage], 0.0
        return simulate(schedule, self.forward, input_grad, weight_grad, self.transfer)


def measured_costs(timelines: Sequence[Timeline], placement: Sequence[int]) -> Costs:
    """The costs with which a simulation of the recorded schedule takes about as long as the record.

    A send, and what a rank does between two actions while it has nothing to wait for, count to the computations beside
    them. Each number is a mean over the micro-batches of a step, and of the steps the median: what is slow now and then
    within every step counts, a step that is slow as a whole does not.

    Args:
        timelines: recorded steps, in seconds and on one clock; they may be of several schedules. Where a stage has no
            split backward, I and W are half of B each.
        placement: the rank of each virtual stage.

    Raises:
        ScheduleError: a stage has no F.
    """
    steps = [list(_computations(timeline, placement)) for timeline in timelines]
    transfer = max(0.0, _typical([_waits(step) for step in steps]).get(_ANY, 0.0))
    own = _typical([_own_times(step, transfer) for step in steps])
    sending = _typical([_sending_times(step) for step in steps])
    stages = range(len(placement))
    missing = [stage for stage in stages if (Kind.F, stage) not in own]
    if missing:
        raise ScheduleError(
            f"{len(timelines)} recorded steps have no forward of stage {missing[0]}; record at least one whole step"
        )
    forward = [own[Kind.F, stage] + sending.get((Kind.F, stage), 0.0) for stage in stages]
    input_grad, weight_grad, backward = [], [], []
    for stage in stages:
        whole = own.get((Kind.B, stage))
        half = (whole or 0.0) / 2
        i, w = own.get((Kind.I, stage), half), own.get((Kind.W, stage), half)
        send = sending.get((Kind.I, stage), 0.0)
        input_grad.append(i + send)
        weight_grad.append(w)
        backward.append((i + w if whole is None else whole) + send)
    return Costs(forward, input_grad, weight_grad, transfer, backward)


def recorded_schedule(timeline: Timeline, placement: Sequence[int]) -> Schedule:
    """The compute actions of a recorded step as a schedule; `placement` is the rank of each virtual stage.

    Raises:
        ScheduleError: if there are no actions.
    """
    orders = tuple(tuple(action for action, _, _ in row if action.kind.is_compute) for row in timeline)
    microbatches = [action.microbatch for order in orders for action in order]
    if not microbatches:
        raise ScheduleError(f"a timeline of {len(timeline)} ranks without any computation is no schedule")
    return Schedule("recorded", orders, max(microbatches) + 1, tuple(placement))


_Key = tuple[Kind, int]
_Samples = Mapping[_Key, Sequence[float]]
_ANY: _Key = (Kind.F, 0)
"""The key of samples that are not told apart by kind and stage."""


class _Computation(NamedTuple):
    """A recorded compute action.

    Attributes:
        free: when its rank was done with what came before; None for a rank's first.
        sent: when its input from another rank was sent; None where there is none.
        sending: what its rank spent on sending its result on.
    """

    action: Action
    free: float | None
    sent: float | None
    start: float
    end: float
    sending: float


def _computations(timeline: Timeline, placement: Sequence[int]) -> Iterator[_Computation]:
    sent: dict[Action, float] = {}
    sending: dict[Action, float] = {}
    for row in timeline:
        before = 0.0
        for action, start, end in row:
            if action.kind in _SENT_BY:
                value = Action(_SENT_BY[action.kind], action.stage, action.microbatch)
                sent[value], sending[value] = end, end - before
            # A receive takes time only where it waits, which is not the rank's doing.
            before = before + (end - start) if action.kind in _RECEIVES else end
    for rank, row in enumerate(timeline):
        free: float | None = None
        for action, start, end in row:
            if action.kind.is_compute:
                inputs = [v for v in needs(action, len(placement)) if placement[v.stage] != rank and v in sent]
                result = Action(Kind.I if action.kind is Kind.B else action.kind, action.stage, action.microbatch)
                latest = max((sent[value] for value in inputs), default=None)
                yield _Computation(action, free, latest, start, end, sending.get(result, 0.0))
            if action.kind not in _RECEIVES:
                free = end


def _waits(step: Sequence[_Computation]) -> _Samples:
    """From the send of an input to the start that waited for it, where the rank was idle meanwhile."""
    return {
        _ANY: [c.start - c.sent for c in step if c.free is not None and c.sent is not None and c.sent > c.free],
    }


def _own_times(step: Sequence[_Computation], transfer: float) -> _Samples:
    """What the computations took, each with the time before it that its rank did not spend waiting."""
    durations: dict[_Key, list[float]] = defaultdict(list)
    gaps: dict[_Key, list[float]] = defaultdict(list)
    for c in step:
        key = (c.action.kind, c.action.stage)
        durations[key].append(c.end - c.start)
        if c.free is not None and (c.sent is None or c.sent + transfer <= c.free):
            gaps[key].append(max(0.0, c.start - c.free))
    return {key: [fmean(values) + (fmean(gaps[key]) if gaps[key] else 0.0)] for key, values in durations.items()}


def _sending_times(step: Sequence[_Computation]) -> _Samples:
    samples: dict[_Key, list[float]] = defaultdict(list)
    for c in step:
        samples[Kind.I if c.action.kind in _BACKWARD else c.action.kind, c.action.stage].append(c.sending)
    return samples


def _typical(steps: Sequence[_Samples]) -> dict[_Key, float]:
    """The mean within a step, the median over steps."""
    means: dict[_Key, list[float]] = defaultdict(list)
    for samples in steps:
        for key, values in samples.items():
            if values:
                means[key].append(fmean(values))
    return {key: median(values) for key, values in means.items()}
