"""A timeline as a file for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from lightning_pipeline.schedules.timeline import Timeline, extent


def save_chrome_trace(timeline: Timeline, path: str | PathLike[str], *, unit: float = 1.0) -> Path:
    """Write every action, sends and receives too, as a complete event, one thread for each rank.

    Args:
        timeline: for each rank, its actions with their times.
        path: the file, usually ``*.json``.
        unit: seconds in one unit of the timeline's times; the first action starts at 0 in the file.

    Returns:
        ``path``.

    Raises:
        ScheduleError: if there are no actions.
    """
    begin, _ = extent(timeline)
    microseconds = unit * 1e6
    events: list[dict[str, object]] = []
    for rank, row in enumerate(timeline):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
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
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path
