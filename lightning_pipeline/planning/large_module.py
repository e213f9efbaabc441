"""A module too large for any cut to balance, such as a language model's head over a large vocabulary.

A stage holds whole modules. One that takes more than a rank's even share of a micro-batch's time unbalances every cut,
and the other ranks wait for its stage. Splitting its work over all ranks (vocabulary parallelism: Yeung et al. 2024,
"Balancing Pipeline Parallelism with Vocabulary Parallelism") would balance them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pipeline.planning.cost_model import Evaluator, Machine, Plan, Segment

_WORTH = 0.05
"""The share of a step's time that splitting the module must save to be worth a word."""


@dataclass(frozen=True)
class LargeModule:
    """A module that unbalances every cut.

    Attributes:
        name: the module.
        share: its share of a micro-batch's time, 0 to 1.
        even_share: the share of the fastest rank if all ranks finished at the same time.
        split_seconds: simulated seconds of a step with all work split evenly over the ranks.
    """

    name: str
    share: float
    even_share: float
    split_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name} takes {self.share:.0%} of a micro-batch's time, where an even share is "
            f"{self.even_share:.0%}, so no cut balances the stages. With its work split over all ranks, a step would "
            f"take about {self.split_seconds * 1e3:.4g} ms"
        )


def find_large_module(segments: Sequence[Segment], plan: Plan, machine: Machine) -> LargeModule | None:
    """The module that makes every cut uneven; None if there is none, or splitting it would gain less than 5 %."""
    total = sum(segment.forward + segment.backward for segment in segments)
    largest = max(segments, key=lambda segment: segment.forward + segment.backward)
    share = (largest.forward + largest.backward) / total if total else 0.0
    speeds = [machine.speed(rank) for rank in range(plan.schedule.num_ranks)]
    even_share = max(speeds) / sum(speeds)
    if share <= even_share:
        return None
    forward, backward = sum(s.forward for s in segments), sum(s.backward for s in segments)
    placement = plan.schedule.placement
    even = [
        replace(stage, forward=forward * portion, backward=backward * portion)
        for stage, rank in zip(plan.stages, placement, strict=True)
        for portion in [speeds[rank] / sum(speeds) / placement.count(rank)]
    ]
    seconds = Evaluator(even, plan.schedule, machine).plan(tuple(range(1, len(even)))).seconds
    if seconds > plan.seconds * (1 - _WORTH):
        return None
    return LargeModule(largest.name or "what the step does before its first module", share, even_share, seconds)
