"""A timeline as a file for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from lightning_pipeline.schedules.timeline import Reductions, Timeline, extent

Event = dict[str, object]


def save_chrome_trace(
    timeline: Timeline,
    path: str | PathLike[str],
    *,
    unit: float = 1.0,
    reductions: Reductions = (),
    labels: Sequence[str] = (),
) -> Path:
    """Write every action, sends and receives too, as a complete event, one thread for each rank.

    All-reduces, of which several may be under way at once, are asynchronous events, on a track of each rank's own.

    Args:
        timeline: for each rank, its actions with their times.
        path: the file, usually ``*.json``.
        unit: seconds in one unit of the timeline's times; the first action starts at 0 in the file.
        reductions: for each rank, the start and end of the all-reduce of each bucket of gradients.
        labels: the ranks' names; default: ``"rank 0"`` and so on.

    Returns:
        ``path``.

    Raises:
        ScheduleError: if there are no actions.
    """
    begin, _ = extent(timeline)
    microseconds = unit * 1e6
    events: list[Event] = []
    for rank, row in enumerate(timeline):
        name = labels[rank] if labels else f"rank {rank}"
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}})
        events += (
            {
                "name": str(action),
                "cat": action.kind.value,
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "ts": (start - begin) * microseconds,
                "dur": (stop - start) * microseconds,
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
            for action, start, stop in row
        )
        for bucket, span in enumerate(reductions[rank] if reductions else ()):
            events += (
                {
                    "name": f"all-reduce, {name}",
                    "cat": "all-reduce",
                    "ph": phase,
                    "id": f"{rank}.{bucket}",
                    "pid": 0,
                    "tid": rank,
                    "ts": (time - begin) * microseconds,
                    "args": {"bucket": bucket},
                }
                for phase, time in zip("be", span, strict=True)
            )
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path
