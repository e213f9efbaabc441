"""Predicts time, bubble and memory of a cut by simulating its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from lightning_pipeline.schedules.schedule import Schedule
from lightning_pipeline.schedules.simulation import Simulation, peak_bytes, simulate
from lightning_pipeline.schedules.validation import ScheduleError

Cuts = tuple[int, ...]
"""The first segment of each virtual stage after the first."""


@dataclass(frozen=True)
class Segment:
    """A part of a step between two places where it can be cut, on one micro-batch.

    Attributes:
        name: the module that begins it; empty for the step's beginning.
        forward: seconds.
        backward: seconds.
        received: bytes that a cut before it sends.
        returned: bytes of gradients that come back over that cut.
        kept: bytes kept for the backward.
        forward_peak: the most bytes that its forward takes of a micro-batch, what it keeps included.
        backward_peak: likewise its backward.
        state: bytes of each parameter it uses, with gradient and optimizer state. Segments that share one on a rank
            hold it once.
        flops: floating-point operations of forward and backward.
        messages: values that a cut before it sends.
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


@dataclass(frozen=True)
class Machine:
    """The devices of one pipeline, in its order, and what is between them.

    Attributes:
        memory: bytes of each rank; one number for all, None for no bound.
        speeds: how fast each rank is, 1 for one on which the segments take their times; empty for equal ranks.
        bytes_per_second: of a link between two ranks.
        latency: seconds of any transfer.
        overhead: seconds that any forward or backward of a stage takes beside its segments.
        message: seconds that a rank spends on any value that it sends or receives.
        byte: seconds that it spends on each byte of them.
        replicas: pipelines that sum their gradients at the end of the step.
        receives_ahead: micro-batches for whose values, and gradients, a rank makes room before they are needed.
        sends_underway: values, and gradients, that a rank may have sent and cannot let go of yet.
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

    def speed(self, rank: int) -> float:
        return self.speeds[rank] if self.speeds else 1.0

    def limit(self, rank: int) -> float:
        """Bytes that this rank has."""
        if self.memory is None:
            return float("inf")
        return self.memory[rank] if isinstance(self.memory, Sequence) else self.memory


@dataclass(frozen=True)
class Plan:
    """A cut with what is expected of it.

    Attributes:
        schedule: the schedule it is for.
        cuts: the first segment of each later virtual stage.
        seconds: of a step, the sum of gradients over replicas included.
        simulation: of the schedule.
        memory: peak bytes of each rank.
        excess: bytes by which the fullest rank has too little; 0 if all fit.
        is_best: no other plan is faster; else the search ended before it was sure.
    """

    schedule: Schedule
    cuts: Cuts
    seconds: float
    simulation: Simulation
    memory: list[float]
    excess: float
    is_best: bool = False

    def stages(self, num_segments: int) -> list[range]:
        """The segments of each virtual stage."""
        return [range(a, b) for a, b in pairwise((0, *self.cuts, num_segments))]


def evaluate(segments: Sequence[Segment], schedule: Schedule, cuts: Cuts, machine: Machine | None = None) -> Plan:
    """What is to be expected of a given cut."""
    return Evaluator(segments, schedule, machine or Machine()).plan(tuple(cuts))


def state_of(segments: Sequence[Segment]) -> float:
    """Bytes of parameters, gradients and optimizer state; what several segments share counts once."""
    state: dict[str, float] = {}
    for segment in segments:
        state.update(segment.state)
    return sum(state.values())


class Evaluator:
    """Simulates cuts of one step under one schedule, and remembers what came of each.

    Args:
        schedule: with whole backwards or split ones; it says the number of virtual stages and where they are.

    Raises:
        ScheduleError: fewer segments than virtual stages.
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
        self.forward = [0.0, *accumulate(s.forward for s in self.segments)]
        self.backward = [0.0, *accumulate(s.backward for s in self.segments)]
        self.kept = [0.0, *accumulate(s.kept for s in self.segments)]
        users: dict[str, list[int]] = {}
        for number, segment in enumerate(self.segments):
            for name in segment.state:
                users.setdefault(name, []).append(number)
        self._shared = {name: numbers for name, numbers in users.items() if len(numbers) > 1}
        self._own_state = [
            0.0,
            *accumulate(sum(size for name, size in s.state.items() if name not in self._shared) for s in self.segments),
        ]
        self.plans: dict[Cuts, Plan] = {}

    def plan(self, cuts: Cuts) -> Plan:
        """Simulate one cut."""
        if cuts in self.plans:
            return self.plans[cuts]
        bounds = (0, *cuts, len(self.segments))
        stages = list(enumerate(pairwise(bounds)))
        forward = [self.work(self.forward, stage, a, b) for stage, (a, b) in stages]
        backward = [self.work(self.backward, stage, a, b) for stage, (a, b) in stages]
        transfer = [self.transfer(cut) for cut in cuts]
        for stage, (a, b) in stages:
            for crossing in (self.segments[cut] for cut in (a, b) if 0 < cut < len(self.segments)):
                values = self.machine.message * crossing.messages
                forward[stage] += values + self.machine.byte * crossing.received
                backward[stage] += values + self.machine.byte * crossing.returned
        # What a split backward's halves take is not known: half each.
        halves = [seconds / 2 for seconds in backward]
        simulation = simulate(self.schedule, forward, halves, halves, transfer)
        memory = peak_bytes(self.schedule, *self._activations(bounds))
        seconds = simulation.makespan
        for rank in range(self.schedule.num_ranks):
            state = self.state([(a, b) for stage, (a, b) in stages if self.placement[stage] == rank])
            memory[rank] += state + self._on_the_way([part for stage, part in stages if self.placement[stage] == rank])
            ends = simulation.spans[rank][-1].end if simulation.spans[rank] else 0.0
            seconds = max(seconds, ends + self._reduction(state))
        excess = max(max(0.0, used - self.machine.limit(rank)) for rank, used in enumerate(memory))
        made = self.plans[cuts] = Plan(self.schedule, cuts, seconds, simulation, memory, excess)
        return made

    def work(self, totals: Sequence[float], stage: int, start: int, stop: int) -> float:
        """Seconds of a row of segments on the rank of a stage; `totals` is `forward` or `backward`."""
        return (totals[stop] - totals[start]) / self.machine.speed(self.placement[stage]) + self.machine.overhead

    def _activations(self, bounds: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
        """Bytes that each stage keeps of a micro-batch, and the most that its forward and its backward take."""
        kept, forward, backward = [], [], []
        for a, b in pairwise(bounds):
            received = self.segments[a].received
            kept.append(self.kept[b] - self.kept[a] + received)
            before = [received + self.kept[number] - self.kept[a] for number in range(a, b)]
            segments = self.segments[a:b]
            forward.append(max(kept[-1], *(x + s.forward_peak for x, s in zip(before, segments, strict=True))))
            backward.append(max(kept[-1], *(x + s.backward_peak for x, s in zip(before, segments, strict=True))))
        return kept, forward, backward

    def _on_the_way(self, parts: Sequence[tuple[int, int]]) -> float:
        """Bytes of what a rank's stages send and receive beside what they work on, whichever of them is the largest."""
        starts = [self.segments[start] for start, _ in parts if start]
        ends = [self.segments[stop] for _, stop in parts if stop < len(self.segments)]
        arriving = max((s.received for s in starts), default=0.0) + max((s.returned for s in ends), default=0.0)
        leaving = max((s.received / max(1, s.messages) for s in ends), default=0.0)
        leaving += max((s.returned / max(1, s.messages) for s in starts), default=0.0)
        return self.machine.receives_ahead * arriving + self.machine.sends_underway * leaving

    def state(self, parts: Sequence[tuple[int, int]]) -> float:
        """Bytes of parameters, gradients and optimizer state of rows of segments on one rank."""
        total = sum(self._own_state[stop] - self._own_state[start] for start, stop in parts)
        for name, numbers in self._shared.items():
            if any(start <= number < stop for start, stop in parts for number in numbers):
                total += self.segments[numbers[0]].state[name]
        return total

    def transfer(self, cut: int) -> float:
        """Seconds that what crosses a cut takes, either way."""
        segment = self.segments[cut]
        size = max(segment.received, segment.returned)
        return self.machine.latency + size / self.machine.bytes_per_second

    def _reduction(self, state: float) -> float:
        """Of gradients in a ring; a fourth of what AdamW's parameters take is their gradients."""
        replicas = self.machine.replicas
        return 2 * (replicas - 1) / replicas * state / 4 / self.machine.bytes_per_second
