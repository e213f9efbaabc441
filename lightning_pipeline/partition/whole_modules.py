"""A cut for steps that have no place where a stage could begin: all of their modules are called several times.

Modules are shared out as they are, each with all of its calls on one stage. The data goes back and forth between the
stages, so that they work less at the same time than where a step is cut in two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

from torch import nn

from lightning_pipeline.partition.costs import StepCosts
from lightning_pipeline.partition.plan import PlannedStage, StagePlan
from lightning_pipeline.schedules.schedule import Schedule

MOST = 16
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
    return found if len(found) <= MOST else None


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
