"""Plans a profiled step: searches the best cuts for some schedules, with large and with small candidates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import combinations, pairwise

from torch import nn

from lightning_pipeline.planning.cost_model import Machine, Plan, state_of
from lightning_pipeline.planning.large_module import find_large_module
from lightning_pipeline.planning.plan import PlannedStage, StagePlan, describe
from lightning_pipeline.planning.profile import Position, Profile
from lightning_pipeline.planning.search import best_plans
from lightning_pipeline.schedules.schedule import Schedule
from lightning_pipeline.schedules.simulation import Simulation

FINENESS = (0.5, 1, 2, 4, 8, 16)
"""Candidates for each stage, about: few and large ones first, then smaller ones where that pays."""
MAX_CANDIDATES = 20
"""Candidates for each stage beyond which no smaller ones are tried."""
EFFORT = 1e6
"""Of all searches for a step together (`best_plans`): two seconds or so."""
NEGLIGIBLE = 0.005
"""The share of a step's time for which the search does not go on."""
_WORTH = 0.05
"""The share of a step's time that smaller candidates, or another order of the ranks, have to save: about what
measurements differ by."""
ALIKE = 1.2
"""Ranks whose speeds differ by a smaller factor count as equally fast: measurements are no more exact."""
_MAX_MODULES = 16
"""Modules to assign as a whole; of more there are too many assignments to go through."""


class NothingToCutError(ValueError):
    """A step that has fewer places to cut than there are to be stages."""


def ranked_plans(
    profile: Profile,
    schedules: Sequence[Schedule],
    machine: Machine,
    state_bytes: Callable[[str], float],
    *,
    fault_of: Callable[[StagePlan], str] = lambda plan: "",
    effort: float = EFFORT,
    most: int = 1,
    moves_ranks: bool = True,
) -> Iterator[tuple[StagePlan, Simulation]]:
    """The best cut of a step for the best of some schedules, and then others in the order of preference, each with its
    simulation. All schedules have the number of micro-batches of the profile.

    Args:
        state_bytes: bytes that a parameter of this name takes with its gradient and optimizer state.
        fault_of: what is wrong with a cut, by a trial; empty if nothing is. A faulty one is passed over.
        most: plans for each schedule and size of candidates.
        moves_ranks: unequal ranks may hold other stages than the schedules say.

    Raises:
        NothingToCutError: the step has too few places to cut.
        ValueError: no cut fits the memory, or all have faults.
    """
    found: list[tuple[float, Plan]] = []
    failure: NothingToCutError | None = None
    for schedule in schedules:
        try:
            own = effort / len(schedules)
            placed = _arrangements(profile, schedule, machine, state_bytes, own) if moves_ranks else [schedule]
            for each in placed:
                found += _best_cuts(profile, each, machine, state_bytes, own / len(placed), most)
        except NothingToCutError as error:
            failure = error
    if failure is not None and not found:
        raise failure
    parts = profile.segments(profile.candidates(0.0)[1:], state_bytes)
    yielded: set[Hashable] = set()
    fault = ""
    while found:
        index = _preferred(found)
        _, chosen = found.pop(index)
        if chosen.excess:  # and so have all that are left
            if yielded:
                return
            raise ValueError(_does_not_fit(chosen, machine))
        large = find_large_module(parts, chosen, machine)
        plan = describe(chosen, machine, is_measured=profile.is_measured, large_module=large)
        # Candidates of different sizes may begin at the same place in the step, under other modules' names.
        places = (
            plan.schedule,
            tuple((stage.rank, stage.parameter_bytes, stage.kept_bytes, stage.flops) for stage in plan.stages),
        )
        if places in yielded:
            continue
        fault = fault_of(plan)
        if not fault:
            yielded.add(places)
            yield plan, chosen.simulation
    if not yielded:
        raise ValueError(
            f"the step cannot be cut automatically, as no cut works that was tried, such as {plan}: {fault}"
        )


def _best_cuts(
    profile: Profile,
    schedule: Schedule,
    machine: Machine,
    state_bytes: Callable[[str], float],
    effort: float,
    most: int,
) -> list[tuple[float, Plan]]:
    """The best cuts at candidates of each fineness, with that fineness."""
    found: list[tuple[float, Plan]] = []
    tried: list[Position] = []
    for fineness in FINENESS:
        calls = profile.candidates(1 / (fineness * schedule.num_stages))
        if found and len(calls) > MAX_CANDIDATES * schedule.num_stages:
            break
        if len(calls) >= schedule.num_stages and calls != tried:
            segments = profile.segments(calls[1:], state_bytes)  # the first call belongs to the first stage
            plans = best_plans(segments, schedule, machine, effort=effort / len(FINENESS), gap=NEGLIGIBLE, most=most)
            found += [(fineness, plan) for plan in plans]
        tried = calls
    if not found:
        names = ", ".join(repr(call.name) for call in tried) or "none of them once"
        most_stages = max(1, len(tried))
        raise NothingToCutError(
            f"{type(profile.root).__name__} is to be cut into {schedule.num_stages} stages, and its {profile.step} "
            f"calls {len(tried)} module{'s' * (len(tried) != 1)} that a stage can begin with ({names}): use "
            f"devices={most_stages}, or num_stages={most_stages}, where the other devices are replicas. A stage begins "
            f"with a submodule that the step calls once, directly or from the forward of a module around it; a "
            f"stage_config may name others, too"
        )
    return found


def _arrangements(
    profile: Profile, schedule: Schedule, machine: Machine, state_bytes: Callable[[str], float], effort: float
) -> list[Schedule]:
    """The schedule, and if some of its ranks are better off in other places, the schedule with the ranks there.

    Two unlike ranks change places for as long as that makes the best cut at large candidates better.
    """
    unlike = [
        (one, other)
        for one, other in combinations(range(schedule.num_ranks), 2)
        if machine.limit(one) != machine.limit(other)
        or not 1 / ALIKE <= machine.speed(one) / machine.speed(other) <= ALIKE
    ]
    calls = profile.candidates(1 / schedule.num_stages)
    if not unlike or len(calls) < schedule.num_stages:
        return [schedule]
    segments = profile.segments(calls[1:], state_bytes)

    def placed(ranks: Sequence[int]) -> Schedule:
        return schedule.on_ranks(dict(enumerate(ranks[place] for place in schedule.placement)))

    def cost(ranks: Sequence[int]) -> tuple[float, float]:
        [plan] = best_plans(segments, placed(ranks), machine, effort=effort / (8 * len(unlike)))
        return plan.excess, plan.seconds

    best: tuple[int, ...] = tuple(range(schedule.num_ranks))
    excess, seconds = cost(best)
    while True:
        changed = [tuple({one: other, other: one}.get(rank, rank) for rank in best) for one, other in unlike]
        costs = {ranks: cost(ranks) for ranks in changed}
        least = min(costs, key=costs.__getitem__)
        if costs[least] >= (excess, seconds * (1 - _WORTH)):
            return [schedule, placed(best)] if best != tuple(range(schedule.num_ranks)) else [schedule]
        best, (excess, seconds) = least, costs[least]


def _preferred(found: Sequence[tuple[float, Plan]]) -> int:
    """The index of the best plan at the largest modules that serve: these are the modules that users know."""
    order = sorted(range(len(found)), key=lambda index: found[index][0])
    best = order[0]
    for other in order:
        (best_fineness, best_plan), (fineness, plan) = found[best], found[other]
        worth = _WORTH if fineness > best_fineness else 0.0
        if (plan.excess, plan.seconds) < (best_plan.excess, best_plan.seconds * (1 - worth)):
            best = other
    return best


def _does_not_fit(plan: Plan, machine: Machine) -> str:
    rank = max(range(len(plan.memory)), key=lambda r: plan.memory[r] - machine.limit(r))
    gib = 1 << 30
    kept = sum(stage.kept for stage in plan.stages)
    return (
        f"the model does not fit: cut as well as it can be for {plan.schedule.num_ranks} stages, rank {rank} needs "
        f"{plan.memory[rank] / gib:.3g} GiB and has {machine.limit(rank) / gib:.3g}, so {plan.excess / gib:.3g} GiB "
        f"are missing. Parameters with gradients and optimizer state take {state_of(plan.stages) / gib:.3g} GiB in "
        f"all, activations {kept / gib:.3g} GiB a micro-batch: use more stages, activation checkpointing, more and "
        f"smaller micro-batches, or a schedule that holds fewer"
    )


def plan_of_modules(profile: Profile, schedule: Schedule, state_bytes: Callable[[str], float]) -> StagePlan | None:
    """A plan for a step without a place where a stage could begin, as all of its modules are called several times.

    Modules are assigned as they are, each with all of its calls on one stage, in the order of their first calls and as
    evenly as possible. The data goes back and forth between the stages, so nothing is simulated: a step is as long as
    if one stage worked at a time. None if there are fewer modules with parameters than stages, or a rank is to have
    several stages.
    """
    num_stages = schedule.num_ranks
    if schedule.num_stages != num_stages:
        return None
    positions: dict[str, set[int]] = {}
    for call in profile.calls:
        positions.setdefault(call.name, set()).update(range(call.start, call.end))

    def sums(modules: Sequence[str]) -> tuple[float, float]:
        own = [profile.positions[number] for name in modules for number in positions[name]]
        return sum(position.forward for position in own), sum(position.backward for position in own)

    seconds = {name: sum(sums([name])) for name in positions}
    names = _modules_to_assign(profile.root, seconds, num_stages)
    if names is None:
        return None
    names.sort(key=[*positions].index)

    def largest(bounds: tuple[int, ...]) -> float:
        return max(sum(seconds[name] for name in names[a:b]) for a, b in pairwise((0, *bounds, len(names))))

    bounds = min(combinations(range(1, len(names)), num_stages - 1), key=largest)
    parts = [names[a:b] for a, b in pairwise((0, *bounds, len(names)))]
    stages = []
    for rank, part in enumerate(parts):
        prefixes = tuple(f"{name}." for name in part)
        parameters = [name for name, _ in profile.root.named_parameters() if name.startswith(prefixes)]
        forward, backward = sums(part)
        state = sum(map(state_bytes, parameters))
        stages.append(PlannedStage(rank, part[0], part[-1], forward, backward, 0.0, state, 0.0, 0.0))
    return StagePlan(
        stage_config={name: stage for stage, part in enumerate(parts) for name in part},
        num_stages=num_stages,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule.name,
        stages=stages,
        step_seconds=profile.seconds * schedule.num_microbatches,
        bubble=1 - 1 / num_stages,
        peak_bytes=[stage.parameter_bytes for stage in stages],
        is_measured=False,
        is_best=False,
    )


def _modules_to_assign(root: nn.Module, seconds: dict[str, float], num_stages: int) -> list[str] | None:
    """The outermost called modules with parameters; the slowest are replaced by those inside until there are enough."""
    found = _called_inside(root, "", seconds)
    while len(found) < num_stages:
        inside = {name: _called_inside(root.get_submodule(name), name, seconds) for name in found}
        slowest = max((name for name in found if len(inside[name]) > 1), key=seconds.__getitem__, default=None)
        if slowest is None:
            return None
        index = found.index(slowest)
        found[index : index + 1] = inside[slowest]
    return found if len(found) <= _MAX_MODULES else None


def _called_inside(module: nn.Module, name: str, called: dict[str, float]) -> list[str]:
    """The outermost called modules with parameters inside of a module."""
    found = []
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if next(child.parameters(), None) is not None:
            found += [full] if full in called else _called_inside(child, full, called)
    return found
