"""Proposes which modules to move to other stages, from the times of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from lightning_pipeline.partition.stage_config import nearest
from lightning_pipeline.planning.cost_model import Machine, Segment, evaluate
from lightning_pipeline.planning.costs import StepCosts
from lightning_pipeline.planning.plan import EFFORT, FINENESS, MOST, NEGLIGIBLE, StagePlan, described
from lightning_pipeline.planning.search import best_plans
from lightning_pipeline.planning.trace import Call
from lightning_pipeline.schedules.recorded_costs import Costs
from lightning_pipeline.schedules.schedule import Schedule

FINEST = 4
"""Candidates of a stage, about: what moves is to be a part that one knows by name."""


@dataclass(frozen=True)
class Rebalance:
    """Another cut, and what it is expected to save.

    Attributes:
        now: the cut that was measured.
        better: the best cut by the same costs; `now`'s, if no other is worth it.
        moves: for each part to move, its first and its last module, its stage now and then.
    """

    now: StagePlan
    better: StagePlan
    moves: list[tuple[str, str, int, int]]

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
    costs: StepCosts,
    stage_config: Mapping[str, int],
    measured: Costs,
    schedule: Schedule,
    machine: Machine,
    state_bytes: Callable[[str], float] = lambda name: 0.0,
) -> Rebalance:
    """The best cut, if every stage's segments share what was measured of it as they share what was estimated.

    Args:
        costs: of the step, measured or estimated.
        stage_config: where it is cut: the first module of each later virtual stage.
        measured: what each virtual stage took.
        schedule: of the run.

    Raises:
        ValueError: a stage begins with a module that the step does not call.
    """
    cuts = _calls_of(costs, stage_config)
    if len(cuts) + 1 != schedule.num_stages:
        raise ValueError(
            f"stage_config={dict(stage_config)} begins {len(cuts) + 1} stages, and the timeline is of a schedule with "
            f"{schedule.num_stages}: give both of the same run"
        )
    calls = _candidates(costs, cuts, schedule.num_stages)
    segments = costs.segments(calls, state_bytes)
    bounds = tuple(calls.index(cut) + 1 for cut in cuts)
    scaled: list[Segment] = []
    for stage, (start, stop) in enumerate(pairwise((0, *bounds, len(segments)))):
        own = segments[start:stop]
        forward, backward = sum(s.forward for s in own), sum(s.backward for s in own)
        scaled += [
            replace(
                s,
                forward=measured.forward[stage] * (s.forward / forward if forward else 1 / len(own)),
                backward=measured.backward[stage] * (s.backward / backward if backward else 1 / len(own)),
            )
            for s in own
        ]
    machine = replace(machine, latency=measured.transfer, bytes_per_second=float("inf"), overhead=0.0)
    now = evaluate(scaled, schedule, bounds, machine)
    best = best_plans(scaled, schedule, machine, effort=EFFORT, gap=NEGLIGIBLE)[0]
    if best.seconds > now.seconds * (1 - NEGLIGIBLE):
        best = now
    stages = [
        {number: stage for stage, part in enumerate(plan.stages(len(scaled))) for number in part}
        for plan in (now, best)
    ]
    moves: list[tuple[str, str, int, int]] = []
    ways = [(stages[0][number], stages[1][number]) for number in range(len(scaled))]
    for (before, after), group in groupby(range(len(scaled)), key=ways.__getitem__):
        if before != after:
            numbers = list(group)
            first, last = (scaled[number].name or "the beginning of the step" for number in (numbers[0], numbers[-1]))
            moves.append((first, last, before, after))
    plans = [described(plan, scaled, is_measured=True) for plan in (now, best)]
    return Rebalance(plans[0], plans[1], moves)


def _calls_of(costs: StepCosts, stage_config: Mapping[str, int]) -> list[Call]:
    """The first call of each later stage's modules, in order."""
    starts: dict[int, Call] = {}
    for call in costs.trace.calls:
        stage = nearest(stage_config, call.name)
        if stage and stage not in starts:
            starts[stage] = call
    missing = sorted({stage for stage in stage_config.values() if stage} - starts.keys())
    if missing:
        keys = [key for key, stage in stage_config.items() if stage == missing[0]]
        raise ValueError(f"the step calls no module of stage {missing[0]} ({', '.join(keys)})")
    return [starts[stage] for stage in sorted(starts)]


def _candidates(costs: StepCosts, cuts: Sequence[Call], num_stages: int) -> list[Call]:
    """Places to cut, those of now among them; fine enough that a move of one matters little."""
    tree = costs.tree()
    calls: list[Call] = []
    for fineness in (f for f in FINENESS if f <= FINEST):
        finer = costs.candidates(1 / (fineness * num_stages), tree)
        if len(finer) <= MOST * num_stages:
            calls = finer
    apart = [
        call
        for call in calls[1:]
        if all(call.end <= cut.start or cut.end <= call.start for cut in cuts)  # neither is inside of the other
    ]
    return sorted([*apart, *cuts], key=lambda call: call.start)
