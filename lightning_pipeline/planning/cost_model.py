"""Predicts time, bubble and memory of a cut by simulating its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from lightning_pipeline.schedules.schedule import Schedule
from lightning_pipeline.schedules.simulation import Simulation, peak_bytes, simulate
from lightning_pipeline.schedules.validation import ScheduleError

Cuts = tuple[int, ...]
"""The first segment of each virtual stage after the first."""


@dataclass(frozen=True)
class Segment:
    """A contiguous part of a step, with its costs for one micro-batch.

    Attributes:
        name: the module that begins it; empty for the step's beginning.
        received: bytes that a cut before it sends.
        returned: bytes of gradients that come back over that cut.
        kept: bytes kept for the backward.
        forward_peak: the most bytes that its forward needs for a micro-batch, including what it keeps.
        backward_peak: likewise for its backward.
        state: bytes of each parameter it uses, with gradient and optimizer state. Segments that share one on a rank
            hold it once.
        flops: floating-point operations of forward and backward.
        messages: values that a cut before it sends.
        last: of joined segments, the module that begins the last one.
    """

    name: str
    forward: float
    backward: float
    received: float = 0.0
    returned: float = 0.0
    kept: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0
    state: Mapping[str, float] = field(default_factory=dict)
    flops: float = 0.0
    messages: int = 0
    last: str = ""


def join(segments: Sequence[Segment]) -> Segment:
    """Consecutive segments as one."""
    first = segments[0]
    kept_before = [0.0, *accumulate(s.kept for s in segments)]
    return Segment(
        name=first.name,
        forward=sum(s.forward for s in segments),
        backward=sum(s.backward for s in segments),
        received=first.received,
        returned=first.returned,
        kept=kept_before[-1],
        # What the earlier segments keep is still there when a later one reaches its peak, in both directions.
        forward_peak=max(kept + s.forward_peak for kept, s in zip(kept_before, segments, strict=False)),
        backward_peak=max(kept + s.backward_peak for kept, s in zip(kept_before, segments, strict=False)),
        state={name: size for s in segments for name, size in s.state.items()},
        flops=sum(s.flops for s in segments),
        messages=first.messages,
        last=segments[-1].name,
    )


def state_of(segments: Iterable[Segment]) -> float:
    """Bytes of parameters, gradients and optimizer state; a parameter that several segments share counts once."""
    return sum({name: size for segment in segments for name, size in segment.state.items()}.values())


@dataclass(frozen=True)
class Machine:
    """The devices of one pipeline, in its order, and the links between them.

    Attributes:
        memory: bytes of each rank; one number for all, None for no limit.
        speeds: relative speed of each rank, 1 for one on which the segments take their times; empty for equal ranks.
        bytes_per_second: of a link between two ranks.
        latency: seconds of any transfer.
        overhead: seconds that any forward or backward of a stage takes beside its segments.
        message: seconds that a rank spends on any value that it sends or receives.
        byte: seconds that it spends on each byte of them.
        replicas: pipelines that sum their gradients at the end of the step.
        receives_ahead: micro-batches whose values, and gradients, a rank allocates before they are needed.
        sends_underway: values, and gradients, that a rank may have sent and cannot free yet.
        offload: the share of what stages keep that goes to host memory while micro-batches wait.
        host_bytes_per_second: of the link to host memory, each way.
    """

    memory: float | Sequence[float] | None = None
    speeds: Sequence[float] = ()
    bytes_per_second: float = float("inf")
    latency: float = 0.0
    overhead: float = 0.0
    message: float = 0.0
    byte: float = 0.0
    replicas: int = 1
    receives_ahead: int = 0
    sends_underway: int = 0
    offload: float = 0.0
    host_bytes_per_second: float = float("inf")

    def speed(self, rank: int) -> float:
        return self.speeds[rank] if self.speeds else 1.0

    def limit(self, rank: int) -> float:
        """Bytes of memory on this rank."""
        if self.memory is None:
            return float("inf")
        return self.memory[rank] if isinstance(self.memory, Sequence) else self.memory

    def least_limit(self, num_ranks: int) -> float:
        """Bytes of memory of the rank that has the least."""
        return min(map(self.limit, range(num_ranks)))

    def transfer(self, after: Segment) -> float:
        """Seconds that the values before a segment take to cross to another rank, in either direction."""
        return self.latency + max(after.received, after.returned) / self.bytes_per_second

    def reduction(self, state: float) -> float:
        """Seconds of a ring all-reduce of gradients; a quarter of a parameter's bytes under AdamW is its gradient."""
        return 2 * (self.replicas - 1) / self.replicas * state / 4 / self.bytes_per_second

    def in_flight(self, starts: Sequence[Segment], ends: Sequence[Segment]) -> float:
        """Bytes of the messages of a rank beside those that its stages work on; the largest stage counts.

        Args:
            starts: the segments before which the rank's stages receive.
            ends: the segments before which they send.
        """
        arriving = max((s.received for s in starts), default=0.0) + max((s.returned for s in ends), default=0.0)
        leaving = max((s.received / max(1, s.messages) for s in ends), default=0.0)
        leaving += max((s.returned / max(1, s.messages) for s in starts), default=0.0)
        return self.receives_ahead * arriving + self.sends_underway * leaving


@dataclass(frozen=True)
class Plan:
    """A simulated cut.

    Attributes:
        schedule: the schedule it is for.
        cuts: the first segment of each later virtual stage.
        stages: the virtual stages, each as one segment.
        seconds: of a step, including the sum of gradients over replicas.
        simulation: of the schedule.
        memory: peak bytes of each rank.
        excess: bytes that the fullest rank lacks; 0 if all fit.
        is_best: no other plan is faster; else the search ended before it was sure.
    """

    schedule: Schedule
    cuts: Cuts
    stages: list[Segment]
    seconds: float
    simulation: Simulation
    memory: list[float]
    excess: float
    is_best: bool = False


class Evaluator:
    """Simulates cuts of one step under one schedule, and remembers the results.

    Args:
        schedule: with whole or split backwards; it determines the number and placement of virtual stages.
    """

    def __init__(self, segments: Sequence[Segment], schedule: Schedule, machine: Machine) -> None:
        self.segments = list(segments)
        self.schedule = schedule.compute()
        self.machine = machine
        self.placement = self.schedule.placement
        self.num_stages = len(self.placement)
        if len(self.segments) < self.num_stages:
            raise ScheduleError(
                f"{len(self.segments)} segments cannot be cut into {self.num_stages} stages: use fewer, or give the "
                f"step more places to cut at"
            )
        # Sums over segments before each one: bounds of many thousand cuts are computed from differences of these.
        self.forward = _sums(s.forward for s in self.segments)
        self.backward = _sums(s.backward for s in self.segments)
        self.kept = _sums(s.kept for s in self.segments)
        users = Counter(name for segment in self.segments for name in segment.state)
        self.unshared_state = _sums(
            sum(size for name, size in segment.state.items() if users[name] == 1) for segment in self.segments
        )
        self.plans: dict[Cuts, Plan] = {}

    def plan(self, cuts: Cuts) -> Plan:
        """Simulate one cut."""
        if cuts in self.plans:
            return self.plans[cuts]
        machine, num_ranks = self.machine, self.schedule.num_ranks
        stages = [join(self.segments[a:b]) for a, b in pairwise((0, *cuts, len(self.segments)))]
        forward, backward = [], []
        for number, (rank, stage) in enumerate(zip(self.placement, stages, strict=True)):
            # A stage receives before its first segment, and sends before the next stage's.
            boundaries = [stages[other] for other in (number, number + 1) if 0 < other < len(stages)]
            fixed = machine.overhead + sum(machine.message * s.messages for s in boundaries)
            speed = machine.speed(rank)
            forward.append(stage.forward / speed + fixed + sum(machine.byte * s.received for s in boundaries))
            backward.append(stage.backward / speed + fixed + sum(machine.byte * s.returned for s in boundaries))
        halves = [seconds / 2 for seconds in backward]  # of a split backward; their shares are unknown
        transfers = [machine.transfer(stage) for stage in stages[1:]]
        kept = [stage.kept + stage.received for stage in stages]
        away = [machine.offload * size for size in kept] if machine.offload else []
        to_host = [size / machine.host_bytes_per_second for size in away] or 0.0
        simulation = simulate(
            self.schedule, forward, halves, halves, transfers, offload=machine.offload, host_transfer=to_host
        )
        forward_peaks, backward_peaks = (
            [max(held, stage.received + peak) for held, stage, peak in zip(kept, stages, of_stages, strict=True)]
            for of_stages in ([s.forward_peak for s in stages], [s.backward_peak for s in stages])
        )
        memory = peak_bytes(self.schedule, kept, forward_peaks, backward_peaks, away)
        seconds = simulation.makespan
        for rank in range(num_ranks):
            own = [number for number, place in enumerate(self.placement) if place == rank]
            state = state_of(stages[number] for number in own)
            starts = [stages[number] for number in own if number > 0]
            ends = [stages[number + 1] for number in own if number + 1 < len(stages)]
            memory[rank] += state + machine.in_flight(starts, ends)
            finished = simulation.spans[rank][-1].end if simulation.spans[rank] else 0.0
            seconds = max(seconds, finished + machine.reduction(state))
        excess = max(max(0.0, memory[rank] - machine.limit(rank)) for rank in range(num_ranks))
        plan = self.plans[cuts] = Plan(self.schedule, cuts, stages, seconds, simulation, memory, excess)
        return plan

    def work(self, totals: Sequence[float], stage: int, start: int, stop: int) -> float:
        """Seconds of consecutive segments on the rank of a stage; `totals` is `forward` or `backward`."""
        return (totals[stop] - totals[start]) / self.machine.speed(self.placement[stage]) + self.machine.overhead


def _sums(amounts: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(amounts)]
