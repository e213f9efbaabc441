"""Plans: where a model is cut into stages and what to expect of it, and the table that shows one.

A cut for steps that have no place where a stage could begin: all of their modules are called several times.

Modules are shared out as they are, each with all of its calls on one stage. The data goes back and forth between the
stages, so that they work less at the same time than where a step is cut in two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_pipeline.planning.cost_model import Machine, Plan, Segment, state_of
from lightning_pipeline.planning.costs import StepCosts
from lightning_pipeline.planning.search import best_plans
from lightning_pipeline.planning.trace import Call
from lightning_pipeline.schedules.schedule import Schedule
from lightning_pipeline.schedules.simulation import Simulation

FINENESS = (0.5, 1, 2, 4, 8, 16)
"""Candidates of a stage: first so few and large, then smaller ones where that pays."""
EFFORT = 1e6
"""Of a search for each fineness and schedule together (`best_plans`): two seconds or so."""
MOST = 20
"""Candidates for each stage beyond which no smaller ones are tried."""
WORTH = 0.05
"""The share of a step's time that smaller candidates have to save: about what measurements differ by."""

NEGLIGIBLE = 0.005
"""The share of a step's time for whose sake the search does not go on."""


class NothingToCutError(ValueError):
    """A step that has fewer places to cut than there are to be stages."""


@dataclass(frozen=True)
class PlannedStage:
    """One virtual stage of a plan, its times in seconds for one micro-batch.

    Attributes:
        rank: its place in the pipeline.
        first: the module that begins it; empty for the step's beginning.
        last: the module of the last candidate in it.
        forward: seconds.
        backward: seconds.
        flops: of forward and backward.
        parameter_bytes: of its parameters with their gradients and optimizer states.
        kept_bytes: what it keeps of a micro-batch for backward.
        received_bytes: what it receives of a micro-batch.
    """

    rank: int
    first: str
    last: str
    forward: float
    backward: float
    flops: float
    parameter_bytes: float
    kept_bytes: float
    received_bytes: float


@dataclass(frozen=True)
class StagePlan:
    """Where a model is cut, and what is expected of it.

    Attributes:
        stage_config: the first module of each later virtual stage, along the data.
        num_stages: ranks of a pipeline.
        num_microbatches: micro-batches a step.
        schedule: the schedule's name.
        stages: of each virtual stage.
        step_seconds: of a training step without what Lightning does around it.
        bubble: idle share of all ranks' time in the simulation, 0 to 1.
        peak_bytes: of each rank, parameters and activations.
        is_measured: the stages' times are measured, not estimated.
        is_best: no other cut at these places is faster.
        is_tried: steps have run in these stages, and `step_seconds` is what they took; else it is simulated.
        reduction_seconds: of `step_seconds`, what sums of gradients over replicas add, which is always simulated.
    """

    stage_config: dict[str, int]
    num_stages: int
    num_microbatches: int
    schedule: str
    stages: list[PlannedStage]
    step_seconds: float
    bubble: float
    peak_bytes: list[float]
    is_measured: bool
    is_best: bool
    is_tried: bool = False
    reduction_seconds: float = 0.0

    @property
    def has_virtual_stages(self) -> bool:
        """Whether ranks hold several virtual stages."""
        return len(self.stages) > self.num_stages

    def save(self, path: str | Path) -> Path:
        """Write the cut as YAML, which ``PipelineStrategy(stage_config=path)`` reads. Returns the path."""
        path = Path(path)
        how = "measured" if self.is_measured else "estimated"
        lines = [
            f"# {self.num_stages} stages, {self.schedule}, {self.num_microbatches} micro-batches: {how}",
            f"# {self.step_seconds * 1e3:.4g} ms a step{' when it was tried' * self.is_tried}.",
            "stage_config:",
            *(f"  {json.dumps(name)}: {stage}" for name, stage in self.stage_config.items()),
            f"num_stages: {self.num_stages}",
            f"num_microbatches: {self.num_microbatches}",
            f"schedule: {self.schedule}",
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def as_dict(self) -> dict[str, Any]:
        """Builtins only, for checkpoints and loggers."""
        return asdict(self)

    def __str__(self) -> str:
        return f"stage_config = {self.stage_config}"


def plan_stages(
    costs: StepCosts, schedules: Sequence[Schedule], machine: Machine, state_bytes: Callable[[str], float]
) -> tuple[StagePlan, Simulation]:
    """The first of the `ranked_plans`, with its simulation.

    Raises:
        NothingToCutError, ValueError: as there.
    """
    return next(ranked_plans(costs, schedules, machine, state_bytes))


def ranked_plans(
    costs: StepCosts,
    schedules: Sequence[Schedule],
    machine: Machine,
    state_bytes: Callable[[str], float],
    *,
    fault_of: Callable[[StagePlan], str] = lambda plan: "",
    effort: float = EFFORT,
    most: int = 1,
) -> Iterator[tuple[StagePlan, Simulation]]:
    """The best cut of a step for the best of some schedules, all for the micro-batches of the costs, and after it
    others in the order of preference, each with its simulation.

    Args:
        state_bytes: bytes that a parameter of this name takes with its gradient and optimizer state.
        fault_of: what is wrong with a cut, by a trial; empty if nothing is. A faulty one is passed over.
        most: plans for each schedule and size of modules to cut at.

    Raises:
        NothingToCutError: the step has too few places to cut.
        ValueError: no cut fits the memory, or all have faults.
    """
    made: list[list[_Made]] = []
    failure: NothingToCutError | None = None
    for schedule in schedules:
        try:
            made += _best_cuts(costs, schedule, machine, state_bytes, effort / len(schedules), most)
        except NothingToCutError as error:
            failure = error
    if not made:
        assert failure is not None
        raise failure
    seen: set[Hashable] = set()
    fault = ""
    while made:
        chosen = _preferred([first for first, *_ in made])
        made = [[one for one in alike if one is not chosen] for alike in made]
        made = [alike for alike in made if alike]
        if chosen.plan.excess and seen:
            return
        if chosen.plan.excess:
            raise ValueError(_does_not_fit(chosen.plan, machine, chosen.segments))
        plan = described(chosen.plan, chosen.segments, is_measured=costs.is_measured)
        if _places(plan) in seen:
            continue
        fault = fault_of(plan)
        if not fault:
            seen.add(_places(plan))
            yield plan, chosen.plan.simulation
    if not seen:
        raise ValueError(f"the step cannot be cut automatically, say with {plan}: {fault}")


def described(plan: Plan, segments: Sequence[Segment], *, is_measured: bool) -> StagePlan:
    """A plan with names in place of numbers."""
    stages = []
    for rank, part in zip(plan.schedule.placement, plan.stages(len(segments)), strict=True):
        own = [segments[index] for index in part]
        stages.append(
            PlannedStage(
                rank=rank,
                first=own[0].name,
                last=own[-1].name,
                forward=sum(s.forward for s in own),
                backward=sum(s.backward for s in own),
                flops=sum(s.flops for s in own),
                parameter_bytes=state_of(own),
                kept_bytes=sum(s.kept for s in own) + own[0].received,
                received_bytes=own[0].received,
            )
        )
    return StagePlan(
        stage_config={stage.first: number for number, stage in enumerate(stages) if number},
        num_stages=plan.schedule.num_ranks,
        num_microbatches=plan.schedule.num_microbatches,
        schedule=plan.schedule.name,
        stages=stages,
        step_seconds=plan.seconds,
        bubble=plan.simulation.bubble,
        peak_bytes=plan.memory,
        is_measured=is_measured,
        is_best=plan.is_best,
        reduction_seconds=plan.seconds - plan.simulation.makespan,
    )


def _places(plan: StagePlan) -> Hashable:
    """Equal for plans that are cut at the same places, though by other modules' names."""
    return plan.schedule, tuple((stage.parameter_bytes, stage.kept_bytes, stage.flops) for stage in plan.stages)


@dataclass(frozen=True, eq=False)
class _Made:
    """A plan for candidates of one fineness."""

    plan: Plan
    segments: list[Segment]
    fineness: float


def _preferred(made: Sequence[_Made]) -> _Made:
    """The best plan at the largest modules that serve: they are what a reader knows, and what is cut at most often."""
    best = min(made, key=lambda item: item.fineness)
    for other in sorted(made, key=lambda item: item.fineness):
        worth = WORTH * (other.fineness > best.fineness)
        if (other.plan.excess, other.plan.seconds) < (best.plan.excess, best.plan.seconds * (1 - worth)):
            best = other
    return best


def _best_cuts(
    costs: StepCosts,
    schedule: Schedule,
    machine: Machine,
    state_bytes: Callable[[str], float],
    effort: float,
    most: int,
) -> list[list[_Made]]:
    """For candidates of each fineness the best cuts."""
    made: list[list[_Made]] = []
    tree = costs.tree()
    tried: list[Call] = []
    for fineness in FINENESS:
        calls = costs.candidates(1 / (fineness * schedule.num_stages), tree)
        if made and len(calls) > MOST * schedule.num_stages:
            break
        if len(calls) >= schedule.num_stages and calls != tried:
            segments = costs.segments(calls[1:], state_bytes)  # the first call is of the first stage
            plans = best_plans(segments, schedule, machine, effort=effort / len(FINENESS), gap=NEGLIGIBLE, most=most)
            made.append([_Made(plan, segments, fineness) for plan in plans])
        tried = calls
    if not made:
        names, most_stages = ", ".join(repr(call.name) for call in tried) or "none", max(1, len(tried))
        raise NothingToCutError(
            f"{type(costs.root).__name__} is to be cut into {schedule.num_stages} stages, and its {costs.step} calls "
            f"{len(tried)} module{'s' * (len(tried) != 1)} that a stage can begin with ({names}): use "
            f"devices={most_stages}, or num_stages={most_stages}, where the other devices are replicas. A stage begins "
            f"with a submodule that the step calls once, directly or from the forward of a module around it; a "
            f"stage_config may name others, too"
        )
    return made


def _does_not_fit(plan: Plan, machine: Machine, segments: Sequence[Segment]) -> str:
    rank = max(range(len(plan.memory)), key=lambda r: plan.memory[r] - machine.limit(r))
    gib = 1 << 30
    kept = sum(segment.kept for segment in segments)
    return (
        f"the model does not fit: cut as well as it can be for {plan.schedule.num_ranks} stages, rank {rank} needs "
        f"{plan.memory[rank] / gib:.3g} GiB and has {machine.limit(rank) / gib:.3g}, so {plan.excess / gib:.3g} GiB "
        f"are missing. Parameters with gradients and optimizer state take {state_of(segments) / gib:.3g} GiB in all, "
        f"activations {kept / gib:.3g} GiB a micro-batch: use more stages, activation checkpointing, more and "
        f"smaller micro-batches, or a schedule that holds fewer"
    )


def plan_table(plan: StagePlan) -> Table:
    """A row for each virtual stage; times are of one micro-batch."""
    how = "measured" if plan.is_measured else "estimated"
    known = f"and a bubble of {plan.bubble:.1%} expected, from {how} times"
    if plan.is_tried:
        known = "when it was tried"
        if plan.reduction_seconds:
            known += f", {plan.reduction_seconds * 1e3:.3g} ms of it expected for sums over replicas"
    title = f"{plan.schedule}, {plan.num_microbatches} micro-batches: {plan.step_seconds * 1e3:.4g} ms a step {known}"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column("virtual stage" if plan.has_virtual_stages else "stage", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("begins with", overflow="fold")
    table.add_column("to", overflow="fold")
    for name in ("forward", "backward", "work", "state", "activations", "receives"):
        table.add_column(name, justify="right")
    for number, stage in enumerate(plan.stages):
        table.add_row(
            str(number),
            str(stage.rank),
            stage.first or "the step",
            stage.last or "",
            f"{stage.forward * 1e3:.3g} ms",
            f"{stage.backward * 1e3:.3g} ms",
            f"{stage.flops / 1e9:.3g} GFLOP",
            size(stage.parameter_bytes),
            size(stage.kept_bytes),
            size(stage.received_bytes),
        )
    return table


def print_plan(plan: StagePlan, *, width: int | None = None) -> None:
    """On standard output: the table, the peak memory, and the cut as it can be pasted."""
    console = Console(width=width, highlight=False)
    if not console.is_terminal and width is None:
        console = Console(width=140, highlight=False)
    console.print(plan_table(plan))
    console.print(f"peak memory of each rank: {', '.join(map(size, plan.peak_bytes))}")
    console.print(str(plan), soft_wrap=True, markup=False)


def size(num_bytes: float) -> str:
    """Such as ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


MOST_MODULES = 16
"""Modules to share out; more would be more ways than can be tried."""


def plan_of_modules(costs: StepCosts, schedule: Schedule, state_bytes: Callable[[str], float]) -> StagePlan | None:
    """Modules on stages, in the order of their first calls, as evenly as they can be by what their calls take. Nothing
    is simulated: a step is as long as if one stage worked at a time.

    None where there are fewer modules with parameters than stages, or a rank is to have several stages.
    """
    num_stages = schedule.num_ranks
    first: dict[str, int] = {}
    positions: dict[str, set[int]] = {}
    times = costs.times
    for call in costs.trace.calls:
        first.setdefault(call.name, call.start)
        positions.setdefault(call.name, set()).update(range(call.start, call.end))
    seconds = {name: sum(times[position] for position in own) for name, own in positions.items()}
    if len(schedule.placement) != num_stages:
        return None
    names = _modules(costs.root, first, seconds, num_stages)
    if names is None:
        return None
    names = sorted(names, key=lambda name: first[name])

    def largest(bounds: tuple[int, ...]) -> float:
        return max(sum(seconds[name] for name in names[a:b]) for a, b in pairwise((0, *bounds, len(names))))

    bounds = min(combinations(range(1, len(names)), num_stages - 1), key=largest)
    parts = [names[a:b] for a, b in pairwise((0, *bounds, len(names)))]
    stages = [
        PlannedStage(
            rank=rank,
            first=part[0],
            last=part[-1],
            forward=sum(costs.forward[position] for name in part for position in positions[name]),
            backward=sum(costs.backward[position] for name in part for position in positions[name]),
            flops=0.0,
            parameter_bytes=sum(map(state_bytes, _parameters(costs.root, part))),
            kept_bytes=0.0,
            received_bytes=0.0,
        )
        for rank, part in enumerate(parts)
    ]
    return StagePlan(
        stage_config={name: stage for stage, part in enumerate(parts) for name in part},
        num_stages=num_stages,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule.name,
        stages=stages,
        step_seconds=sum(times) * schedule.num_microbatches,
        bubble=1 - 1 / num_stages,
        peak_bytes=[stage.parameter_bytes for stage in stages],
        is_measured=False,
        is_best=False,
    )


def _modules(root: nn.Module, first: dict[str, int], seconds: dict[str, float], num_stages: int) -> list[str] | None:
    """The outermost modules with parameters that are called, of which there are enough."""
    found = [*_within(root, "", first)]
    while len(found) < num_stages:
        inside = {name: [*_within(root.get_submodule(name), name, first)] for name in found}
        largest = max((name for name in found if len(inside[name]) > 1), key=seconds.__getitem__, default=None)
        if largest is None:
            return None
        found[found.index(largest) : found.index(largest) + 1] = inside[largest]
    return found if len(found) <= MOST_MODULES else None


def _within(module: nn.Module, name: str, called: dict[str, int]) -> Iterator[str]:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if next(child.parameters(), None) is not None:
            if full in called:
                yield full
            else:
                yield from _within(child, full, called)


def _parameters(root: nn.Module, names: list[str]) -> Iterator[str]:
    for name, _ in root.named_parameters():
        if any(name.startswith(f"{module}.") for module in names):
            yield name
