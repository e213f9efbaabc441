"""What a run's recorded times say about its costs, so that other schedules can be simulated with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

from lightning_pipeline.schedules.action import Action, Kind
from lightning_pipeline.schedules.dataflow import needs
from lightning_pipeline.schedules.errors import ScheduleError
from lightning_pipeline.schedules.timeline import Timeline

_SENDS = {Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.I}
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


@dataclass(frozen=True)
class Costs:
    """What the actions of each virtual stage take, in seconds; the arguments of :func:`simulate`, in its order.

    Attributes:
        forward: time of F, one number for each virtual stage.
        input_grad: time of I, likewise. B takes ``input_grad + weight_grad``.
        weight_grad: time of W, likewise.
        transfer: from the end of a computation to the moment its value is there on another rank.
    """

    forward: list[float]
    input_grad: list[float]
    weight_grad: list[float]
    transfer: float


def measured_costs(timelines: Sequence[Timeline], placement: Sequence[int]) -> Costs:
    """The costs with which a simulation of the recorded schedule takes as long as the record.

    A send, and what a rank does between two actions while it has nothing to wait for, count to the computations beside
    them. Each number is the mean over micro-batches, and for each of these the median over the recorded steps.

    Args:
        timelines: recorded steps, in seconds and on one clock. They may be of several schedules: where a stage has both
            whole and split backwards, I and W are those of the split ones; where it has whole ones only, a half each.
        placement: the rank of each virtual stage.

    Raises:
        ScheduleError: a stage has no F.
    """
    samples = _Samples()
    steps = [list(_computations(timeline, placement)) for timeline in timelines]
    transfer = _transfer([computation for step in steps for computation in step])
    for step in steps:
        for computation in step:
            samples.add(computation, transfer)
    stages = range(len(placement))
    missing = [stage for stage in stages if not samples.has(Kind.F, stage)]
    if missing:
        raise ScheduleError(
            f"{len(timelines)} recorded steps have no forward of stage {missing[0]}; record at least one whole step"
        )
    forward = [samples.total(Kind.F, stage) for stage in stages]
    input_grad, weight_grad = [], []
    for stage in stages:
        split = samples.has(Kind.I, stage)
        i, w = (Kind.I, Kind.W) if split else (Kind.B, Kind.B)
        share = 1.0 if split else 0.5
        input_grad.append(samples.own(i, stage) * share + samples.sending(Kind.I, stage))
        weight_grad.append(samples.own(w, stage) * share)
    return Costs(forward, input_grad, weight_grad, transfer)


class _Computation(NamedTuple):
    """A recorded compute action: when its rank was free for it, when its input was sent, when it ran and was sent on.

    `free` is None for a rank's first action, `sent` where the input is of the same rank.
    """

    action: Action
    free: float | None
    sent: float | None
    start: float
    end: float
    sending: float

    @property
    def waited(self) -> float | None:
        """From the send of the input to the start, if the rank was idle meanwhile."""
        if self.free is None or self.sent is None or self.sent <= self.free:
            return None
        return self.start - self.sent

    def gap(self, transfer: float) -> float | None:
        """What the rank itself spent before the start; None where it may have waited."""
        if self.free is None or (self.sent is not None and self.sent + transfer > self.free):
            return None
        return self.start - self.free


@dataclass
class _Samples:
    """Seconds by kind, stage and micro-batch, one for each step."""

    durations: dict[tuple[Kind, int], dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    gaps: dict[tuple[Kind, int], dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    sends: dict[tuple[Kind, int], dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, computation: _Computation, transfer: float) -> None:
        kind, stage, microbatch = (getattr(computation.action, name) for name in ("kind", "stage", "microbatch"))
        sent = Kind.I if kind is Kind.B else kind
        self.durations[kind, stage].setdefault(microbatch, []).append(computation.end - computation.start)
        self.sends[sent, stage].setdefault(microbatch, []).append(computation.sending)
        gap = computation.gap(transfer)
        if gap is not None:
            self.gaps[kind, stage].setdefault(microbatch, []).append(max(0.0, gap))

    def has(self, kind: Kind, stage: int) -> bool:
        return (kind, stage) in self.durations

    def own(self, kind: Kind, stage: int) -> float:
        return _typical(self.durations[kind, stage]) + _typical(self.gaps[kind, stage])

    def sending(self, kind: Kind, stage: int) -> float:
        return _typical(self.sends[kind, stage])

    def total(self, kind: Kind, stage: int) -> float:
        return self.own(kind, stage) + self.sending(kind, stage)


def _typical(by_microbatch: dict[int, list[float]]) -> float:
    """The first micro-batch of a step may be slow in every step, and that counts; what is slow once does not."""
    return fmean(median(values) for values in by_microbatch.values()) if by_microbatch else 0.0


def _transfer(computations: Sequence[_Computation]) -> float:
    waits = [computation.waited for computation in computations]
    found = [wait for wait in waits if wait is not None]
    return max(0.0, median(found)) if found else 0.0


def _computations(timeline: Timeline, placement: Sequence[int]) -> Iterator[_Computation]:
    sent: dict[Action, float] = {}
    sending: dict[Action, float] = {}
    for row in timeline:
        for action, start, end in row:
            if action.kind in _SENDS:
                value = Action(_SENDS[action.kind], action.stage, action.microbatch)
                sent[value], sending[value] = end, end - start
    for rank, row in enumerate(timeline):
        free: float | None = None
        for action, start, end in row:
            if action.kind.is_compute:
                remote = [v for v in needs(action, len(placement)) if placement[v.stage] != rank and v in sent]
                value = Action(Kind.I if action.kind is Kind.B else action.kind, action.stage, action.microbatch)
                arrival = max((sent[v] for v in remote), default=None)
                yield _Computation(action, free, arrival, start, end, sending.get(value, 0.0))
            if action.kind not in _RECEIVES:
                free = end
