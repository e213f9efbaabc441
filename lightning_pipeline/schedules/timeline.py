"""What each rank does when, simulated or recorded, and how much of that time is idle."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeline.schedules.action import Action
from lightning_pipeline.schedules.errors import ScheduleError

Timeline = Sequence[Sequence[tuple[Action, float, float]]]
"""For each rank, its actions with the times they start and end: ``Simulation.spans``, or what a run recorded."""


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
