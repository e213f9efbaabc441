"""Proposes which modules to move to other stages, from the times of a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from lightning_pipeline.partition.stage_map import nearest
from lightning_pipeline.planning.cost_model import Evaluator, Machine, Plan, Segment, join
from lightning_pipeline.planning.plan import StagePlan, describe
from lightning_pipeline.planning.planner import EFFORT, FINENESS, MAX_CANDIDATES, NEGLIGIBLE
from lightning_pipeline.planning.profile import Position, Profile
from lightning_pipeline.planning.search import best_plans
from lightning_pipeline.schedules.recorded_costs import Costs
from lightning_pipeline.schedules.schedule import Schedule

_FINEST = 4
"""Candidates for each stage, about: modules that move should be ones that users know by name."""


@dataclass(frozen=True)
class Move:
    """One candidate moved over the boundary beside it.

    Attributes:
        module: the module that begins it.
        before: its stage now.
        after: the neighbouring stage.
        gain: the share of a step's time that it saves; negative if the step gets longer.
    """

    module: str
    before: int
    after: int
    seconds: float
    gain: float


@dataclass(frozen=True)
class Rebalance:
    """Another cut, and what it is expected to save.

    Attributes:
        now: the cut that was measured.
        better: the best cut by the same costs; `now`'s, if no other is worth it.
        moves: for each part to move, its first and its last module, its stage now and then.
        alone: what each module next to a boundary would save if it alone moved over it, the best first.
    """

    now: StagePlan
    better: StagePlan
    moves: list[tuple[str, str, int, int]]
    alone: list[Move]

    @property
    def gain(self) -> float:
        """The share of a step's time that is saved, 0 to 1."""
        return 1 - self.better.step_seconds / self.now.step_seconds

    def __str__(self) -> str:
        if not self.moves:
            return f"the cut is as good as any: {self.now.step_seconds * 1e3:.4g} ms a step by its measured times"
        moved = "; ".join(
            f"{first}{f' to {last}' * (last != first)} from stage {before} to stage {after}"
            for first, last, before, after in self.moves
        )
        return (
            f"move {moved}: expects {self.better.step_seconds * 1e3:.4g} ms a step in place of "
            f"{self.now.step_seconds * 1e3:.4g}, {self.gain:.1%} less, with stage_config={self.better.stage_config}"
        )


def rebalance(
    profile: Profile,
    stage_config: Mapping[str, int],
    measured: Costs,
    schedule: Schedule,
    state_bytes: Callable[[str], float] = lambda name: 0.0,
    speeds: Sequence[float] = (),
) -> Rebalance:
    """The best cut, if the segments of a stage share its measured times in proportion to the profile's.

    Args:
        stage_config: where the step is cut: the first module of each later virtual stage.

    Raises:
        ValueError: a stage begins with a module that the step does not call.
    """
    beginnings = _first_calls(profile, stage_config)
    if len(beginnings) + 1 != schedule.num_stages:
        raise ValueError(
            f"stage_config={dict(stage_config)} begins {len(beginnings) + 1} stages, and the timeline is of a schedule "
            f"with {schedule.num_stages}: give both of the same run"
        )
    calls = _candidates(profile, beginnings, schedule.num_stages)
    segments = profile.segments(calls, state_bytes)
    cuts = tuple(calls.index(call) + 1 for call in beginnings)
    machine = Machine(latency=measured.transfer, speeds=speeds)
    scaled: list[Segment] = []
    for stage, (start, stop) in enumerate(pairwise((0, *cuts, len(segments)))):
        own = segments[start:stop]
        whole, speed = join(own), machine.speed(schedule.placement[stage])  # segments have their times at speed 1
        scaled += [
            replace(
                segment,
                forward=measured.forward[stage] * speed * _share(segment.forward, whole.forward, len(own)),
                backward=measured.backward[stage] * speed * _share(segment.backward, whole.backward, len(own)),
            )
            for segment in own
        ]
    now = Evaluator(scaled, schedule, machine).plan(cuts)
    best = best_plans(scaled, schedule, machine, effort=EFFORT, gap=NEGLIGIBLE)[0]
    if best.seconds > now.seconds * (1 - NEGLIGIBLE):
        best = now
    ways = [(bisect_right(now.cuts, number), bisect_right(best.cuts, number)) for number in range(len(scaled))]
    moves: list[tuple[str, str, int, int]] = []
    for (before, after), group in groupby(range(len(scaled)), key=ways.__getitem__):
        if before != after:
            names = [_name_of(scaled[number]) for number in group]
            moves.append((names[0], names[-1], before, after))
    alone = _moved_alone(scaled, Evaluator(scaled, schedule, machine), now)
    return Rebalance(describe(now, machine, is_measured=True), describe(best, machine, is_measured=True), moves, alone)


def _moved_alone(segments: Sequence[Segment], evaluator: Evaluator, now: Plan) -> list[Move]:
    borders = (0, *now.cuts, len(segments))
    found: list[Move] = []
    for stage, cut in enumerate(now.cuts):
        for moved, before, after in ((cut - 1, stage, stage + 1), (cut, stage + 1, stage)):
            if borders[before + 1] - borders[before] > 1:  # else nothing would be left of its stage
                cuts = list(now.cuts)
                cuts[stage] = moved if after > before else moved + 1
                seconds = evaluator.plan(tuple(cuts)).seconds
                found.append(Move(_name_of(segments[moved]), before, after, seconds, 1 - seconds / now.seconds))
    return sorted(found, key=lambda move: move.seconds)


def _name_of(segment: Segment) -> str:
    return segment.name or "the beginning of the step"


def _share(part: float, whole: float, count: int) -> float:
    return part / whole if whole else 1 / count


def _first_calls(profile: Profile, stage_config: Mapping[str, int]) -> list[Position]:
    """The first call of each later stage's modules, in order."""
    starts: dict[int, Position] = {}
    for call in profile.calls:
        stage = nearest(stage_config, call.name)
        if stage and stage not in starts:
            starts[stage] = call
    missing = sorted({stage for stage in stage_config.values() if stage} - starts.keys())
    if missing:
        keys = [key for key, stage in stage_config.items() if stage == missing[0]]
        raise ValueError(f"the step calls no module of stage {missing[0]} ({', '.join(keys)})")
    return [starts[stage] for stage in sorted(starts)]


def _candidates(profile: Profile, cuts: Sequence[Position], num_stages: int) -> list[Position]:
    """Places to cut, the present ones among them; fine enough that a move of one matters little."""
    calls: list[Position] = []
    for fineness in FINENESS:
        finer = profile.candidates(1 / (fineness * num_stages))
        if fineness <= _FINEST and len(finer) <= MAX_CANDIDATES * num_stages:
            calls = finer
    apart = [
        call
        for call in calls[1:]
        if all(call.end <= cut.start or cut.end <= call.start for cut in cuts)  # neither is inside of the other
    ]
    return sorted([*apart, *cuts], key=lambda call: call.start)
