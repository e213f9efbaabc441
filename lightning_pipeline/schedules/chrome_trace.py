"""A timeline as a file for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_pipeline.schedules.action import Action
from lightning_pipeline.schedules.errors import ScheduleError, shown
from lightning_pipeline.schedules.limits import MAX_PROCESSES, MAX_TIME, MAX_TRACE_BYTES
from lightning_pipeline.schedules.text_file import read_text
from lightning_pipeline.schedules.timeline import Reductions, Timeline, extent

Event = dict[str, object]


def load_chrome_trace(path: str | PathLike[str]) -> list[list[tuple[Action, float, float]]]:
    """The timeline that :func:`save_chrome_trace` has written, in seconds; all-reduces are left out.

    Raises:
        ScheduleError: the file is no such trace.
        OSError: if it cannot be read.
    """
    try:
        content = json.loads(read_text(path, kind="a trace of a pipeline", most=MAX_TRACE_BYTES))
        spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
        ranks = [int(_number(span, "tid", MAX_PROCESSES)) for span in spans]
        rows: list[list[tuple[Action, float, float]]] = [[] for _ in range(1 + max(ranks))]
        for rank, span in zip(ranks, spans, strict=True):
            start, length = (_number(span, name, MAX_TIME) / 1e6 for name in ("ts", "dur"))
            rows[rank].append((Action.parse(span["name"]), start, start + length))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ScheduleError(f"{path} is no trace of a pipeline ({type(error).__name__}: {error})") from None
    return rows


def _number(event: dict[str, Any], name: str, most: float) -> float:
    value = event[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < most:
        raise ValueError(f"{name} is {shown(value)}, and not a number from 0 to {most:g}")
    return value


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
