"""Which plan to take: the best by simulation run for some steps first, as a machine does more than is simulated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from torch import nn

from lightning_pipeline.partition.compiled import is_compiled
from lightning_pipeline.partition.plan import WORTH, StagePlan
from lightning_pipeline.strategy.trial_steps import LEAST

Everybody = Callable[[Callable[[], Any]], Any]
"""What the first rank makes of a function, on all ranks."""

MOST = 4
"""Plans to try."""
NEAR = 0.15
"""By which share of a step another plan may be expected to be slower than the first one, and be tried."""
BUDGET_S = 4.5
"""For all trials together, or so."""


def choose_plan(
    ranked: Callable[[float, int], Sequence[StagePlan]],
    times: Callable[[Sequence[StagePlan], float], list[list[float]]],
    module: nn.Module,
    everybody: Everybody,
    *,
    share_cores: bool,
    limit: float,
) -> StagePlan:
    """The plan to take. All ranks of the pipeline must call it.

    Where ranks share cores, what it costs them to take turns comes first: how much longer than simulated the steps of a
    plan take, in which nearly all work is done in turns. The plans are then made once more.

    Args:
        ranked: on the first rank, the plans that are expected to be the best where turns cost so much (`simulate`), so
            many or fewer.
        times: seconds of steps of some plans, in so many seconds altogether (`TrialSteps.times`).
        share_cores: whether ranks do.
        limit: bytes that a device has.
    """

    def worth(turns: float, most: int, *others: StagePlan) -> tuple[StagePlan, list[StagePlan]]:
        first, *more = ranked(turns, most)
        return first, worth_trying(module, _once([first, *others, *more]), budget, limit)

    budget = BUDGET_S
    first, plans = everybody(lambda: worth(1.0, 1 if share_cores else MOST))
    if plans and share_cores:
        took = times(plans, 0.0)
        tried = everybody(lambda: best_tried(plans, took))
        turns = max(1.0, median(took[0]) / (first.step_seconds - first.reduction_seconds))
        budget -= median(took[0]) * LEAST
        first, plans = everybody(lambda: worth(turns, MOST, tried))
        if not plans and tried.step_seconds * (1 - WORTH) < first.step_seconds:
            return tried
    if not plans:
        return first
    all_took = times(plans, budget)
    return everybody(lambda: best_tried(plans, all_took))


def worth_trying(
    module: nn.Module, plans: Sequence[StagePlan], budget: float, limit: float
) -> list[StagePlan]:
    """Those of some plans, the best first, that may be the best, and can be tried.

    Args:
        budget: seconds that trials may take.
        limit: bytes that a device has; plans need room beside the whole module.
    """
    if not plans[0].is_measured:
        return []
    if any(is_compiled(part) for part in module.modules()):  # a compiler takes longer than all steps together
        return []
    whole = 2 * sum(parameter.nbytes for parameter in module.parameters())  # with gradients
    chosen: list[StagePlan] = []
    left = budget
    for plan in plans:
        needed = plan.step_seconds * LEAST
        is_near = plan.step_seconds <= plans[0].step_seconds * (1 + NEAR)
        if is_near and needed <= left and whole + max(plan.peak_bytes) <= limit:
            chosen.append(plan)
            left -= needed
        elif not chosen:  # others say nothing without the first one
            break
    return chosen[:MOST]


def best_tried(plans: Sequence[StagePlan], times: Sequence[Sequence[float]]) -> StagePlan:
    """The plan that was the fastest, as it was when it was tried; the first one of those that were.

    Args:
        times: seconds of each plan's steps, which took turns with those of the others, without sums over replicas.
    """
    took = [median(own) + plan.reduction_seconds for plan, own in zip(plans, times, strict=True)]
    seconds = min(took)
    return replace(plans[took.index(seconds)], step_seconds=seconds, is_tried=True)


def _once(plans: Sequence[StagePlan]) -> list[StagePlan]:
    """The first of those that are cut the same, for the same schedule."""
    found: dict[Hashable, StagePlan] = {}
    for plan in plans:
        found.setdefault((plan.schedule, plan.num_microbatches, *plan.stage_config), plan)
    return list(found.values())
