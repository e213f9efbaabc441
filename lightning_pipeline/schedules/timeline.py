"""What each rank does when, simulated or recorded, and how much of that time is idle."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeline.schedules.action import Action
from lightning_pipeline.schedules.errors import ScheduleError

Timeline = Sequence[Sequence[tuple[Action, float, float]]]
"""For each rank, its actions with the times they start and end: ``Simulation.spans``, or what a run recorded."""

Reductions = Sequence[Sequence[tuple[float, float]]]
"""For each rank, when the all-reduces of its gradients over replicas start and end, one for each bucket."""


def extent(timeline: Timeline) -> tuple[float, float]:
    """The first start and the last end.

    Raises:
        ScheduleError: if there are no actions.
    """
    spans = [span for row in timeline for span in row]
    if not spans:
        raise ScheduleError(f"a timeline of {len(timeline)} ranks without any action has no beginning and no end")
    return min(start for _, start, _ in spans), max(end for _, _, end in spans)


def idle_share(timeline: Timeline) -> float:
    """The share of all ranks' time, from the first start to the last end, that is not computation: 0 to 1.

    Raises:
        ScheduleError: if there are no actions.
    """
    begin, end = extent(timeline)
    busy = sum(stop - start for row in timeline for action, start, stop in row if action.kind.is_compute)
    return 1 - busy / ((end - begin) * len(timeline)) if end > begin else 0.0


def overlapped_share(timeline: Timeline, reductions: Reductions) -> float:
    """The share of the time in which a rank's gradients travel that passes before the last action's end: 0 to 1.

    What comes after it is what the all-reduces add to the step; 1.0 where nothing travels.

    Raises:
        ScheduleError: if there are no actions.
    """
    _, end = extent(timeline)
    spans = [span for row in reductions for span in one_at_a_time(row)]
    total = sum(stop - start for start, stop in spans)
    overlapped = sum(max(0.0, min(stop, end) - start) for start, stop in spans)
    return overlapped / total if total > 0 else 1.0


def one_at_a_time(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """All the time that `spans` cover, in their order of ending: each from its start, or the end of the one before.

    Buckets that start together travel one after another; this is about when each of them does.
    """
    shares: list[tuple[float, float]] = []
    for start, end in sorted(spans, key=lambda span: span[1]):
        shares.append((max(start, shares[-1][1]) if shares else start, end))
    return shares
