"""Derives costs from a run's recorded times, so that other schedules can be simulated with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from lightning_pipeline.schedules.schedule import Action, Kind, Schedule
from lightning_pipeline.schedules.simulation import SENDS, Simulation, needs, sent_by, simulate, yields
from lightning_pipeline.schedules.timeline import Timeline
from lightning_pipeline.schedules.validation import ScheduleError

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


@dataclass(frozen=True)
class Costs:
    """What the actions of each virtual stage take, in seconds.

    Attributes:
        forward: time of F, one number for each virtual stage.
        input_grad: time of I, likewise.
        weight_grad: time of W, likewise.
        transfer: from the end of a computation until its value has arrived on another rank.
        backward: time of B, which may be less than I and W take together; their sum where no B was seen.
        transfers: `transfer` of each boundary, as their bytes and links differ; empty if it is the same for all.
    """

    forward: list[float]
    input_grad: list[float]
    weight_grad: list[float]
    transfer: float
    backward: list[float]
    transfers: list[float] = field(default_factory=list)

    def simulate(self, schedule: Schedule, offload: float = 0) -> Simulation:
        """What `schedule` would do with these costs: the stages that it does not split take `backward`.

        Args:
            offload: the share of activations that goes to host memory while they wait, which takes no time here.
        """
        split = {action.stage for order in schedule.orders for action in order if action.kind is Kind.I}
        input_grad, weight_grad = list(self.input_grad), list(self.weight_grad)
        for stage in set(range(schedule.num_stages)) - split:
            input_grad[stage], weight_grad[stage] = self.backward[stage], 0.0
        transfers = self.transfers or self.transfer
        return simulate(schedule, self.forward, input_grad, weight_grad, transfers, offload=offload)


def equal_costs(num_stages: int) -> Costs:
    """One unit of time for each F, I and W, none for transfers."""
    one = [1.0] * num_stages
    return Costs(one, one, one, 0.0, [2.0] * num_stages)


def measured_costs(timelines: Sequence[Timeline], placement: Sequence[int]) -> Costs:
    """The costs with which a simulation of the recorded schedule takes about as long as the record.

    A send, and time between two actions in which a rank has nothing to wait for, count towards the computations beside
    them. Each number is a mean over the micro-batches of a step, and the median over steps: what is slow now and then
    within every step counts, a step that is slow as a whole does not.

    Args:
        timelines: recorded steps, in seconds and on one clock; they may be of several schedules. Where a stage has no
            split backward, I and W are half of B each.
    """
    steps = [list(_computations(timeline, placement)) for timeline in timelines]
    waits = [[wait for c in step if (wait := c.wait_for_input) is not None] for step in steps]
    transfer = max(0.0, median([fmean(of_step) for of_step in waits if of_step] or [0.0]))
    waits_at: list[list[float]] = [[] for _ in placement[1:]]  # the mean of each step
    for step in steps:
        waiting = [c for c in step if c.wait_for_input is not None]
        for boundary, same in _grouped(waiting, lambda c: c.boundary):
            waits_at[boundary].append(fmean(wait for c in same if (wait := c.wait_for_input) is not None))
    transfers = [max(0.0, median(times)) if times else transfer for times in waits_at]
    own_of_steps: dict[_Key, list[float]] = defaultdict(list)
    sending_of_steps: dict[_Key, list[float]] = defaultdict(list)
    for step in steps:
        for key, same in _grouped(step, lambda c: (c.action.kind, c.action.stage)):
            gaps = [gap for c in same if (gap := c.gap_before(transfers)) is not None]
            own_of_steps[key].append(fmean(c.end - c.start for c in same) + (fmean(gaps) if gaps else 0.0))
        for key, same in _grouped(step, lambda c: (c.result.kind, c.result.stage)):
            sending_of_steps[key].append(fmean(c.sending for c in same))
    own = {key: median(times) for key, times in own_of_steps.items()}
    sending = {key: median(times) for key, times in sending_of_steps.items()}
    forward, input_grad, weight_grad, backward = [], [], [], []
    for stage in range(len(placement)):
        if (Kind.F, stage) not in own:
            raise ScheduleError(
                f"{len(timelines)} recorded steps have no forward of stage {stage}; record at least one whole step"
            )
        forward.append(own[Kind.F, stage] + sending[Kind.F, stage])
        whole = own.get((Kind.B, stage))
        half = (whole or 0.0) / 2
        i, w = own.get((Kind.I, stage), half), own.get((Kind.W, stage), half)
        send = sending.get((Kind.I, stage), 0.0)
        input_grad.append(i + send)
        weight_grad.append(w)
        backward.append((i + w if whole is None else whole) + send)
    return Costs(forward, input_grad, weight_grad, transfer, backward, transfers)


def recorded_schedule(timeline: Timeline, placement: Sequence[int]) -> Schedule:
    """The compute actions of a recorded step as a schedule; `placement` is the rank of each virtual stage."""
    orders = tuple(tuple(action for action, _, _ in row if action.kind.is_compute) for row in timeline)
    microbatches = [action.microbatch for order in orders for action in order]
    if not microbatches:
        raise ScheduleError(f"a timeline of {len(timeline)} ranks without any computation is no schedule")
    return Schedule("recorded", orders, max(microbatches) + 1, tuple(placement))


_Key = tuple[Kind, int]
_K = TypeVar("_K")


class _Computation(NamedTuple):
    """A recorded compute action.

    Attributes:
        free: when its rank had finished its earlier actions; None for a rank's first.
        sent: when its input from another rank was sent; None where there is none.
        sending: what its rank spent on sending its result on.
    """

    action: Action
    free: float | None
    sent: float | None
    start: float
    end: float
    sending: float

    @property
    def result(self) -> Action:
        """What another rank may receive of it; of a whole backward the gradients of the inputs."""
        return yields(self.action)[0]

    @property
    def boundary(self) -> int:
        """The boundary over which its input comes."""
        return self.action.stage - (self.action.kind is Kind.F)

    @property
    def wait_for_input(self) -> float | None:
        """Seconds from the send of its input, where the rank was idle then; else None."""
        is_idle = self.free is not None and self.sent is not None and self.sent > self.free
        return self.start - self.sent if is_idle else None  # type: ignore[operator]

    def gap_before(self, transfers: Sequence[float]) -> float | None:
        """Seconds before it in which the rank had nothing to wait for; None if it may have waited."""
        if self.free is None or (self.sent is not None and self.sent + transfers[self.boundary] > self.free):
            return None
        return max(0.0, self.start - self.free)


def _computations(timeline: Timeline, placement: Sequence[int]) -> Iterator[_Computation]:
    sent: dict[Action, float] = {}
    sending: dict[Action, float] = {}
    for row in timeline:
        before = 0.0
        for action, start, end in row:
            if action.kind in SENDS:
                value = sent_by(action)
                sent[value], sending[value] = end, end - before
            # A receive takes time only where it waits, which is not the rank's doing.
            before = before + (end - start) if action.kind in _RECEIVES else end
    for rank, row in enumerate(timeline):
        free: float | None = None
        for action, start, end in row:
            if action.kind.is_compute:
                inputs = [v for v in needs(action, len(placement)) if placement[v.stage] != rank and v in sent]
                latest = max((sent[value] for value in inputs), default=None)
                computation = _Computation(action, free, latest, start, end, 0.0)
                yield computation._replace(sending=sending.get(computation.result, 0.0))
            if action.kind not in _RECEIVES:
                free = end


def _grouped(
    step: Sequence[_Computation], key_of: Callable[[_Computation], _K]
) -> Iterable[tuple[_K, list[_Computation]]]:
    groups: dict[_K, list[_Computation]] = defaultdict(list)
    for computation in step:
        groups[key_of(computation)].append(computation)
    return groups.items()
