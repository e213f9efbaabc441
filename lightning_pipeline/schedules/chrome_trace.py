"""Timelines as traces in Chrome's format, which chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_pipeline.schedules.schedule import Action
from lightning_pipeline.schedules.simulation import SENDS, needs, sent_by
from lightning_pipeline.schedules.timeline import Reductions, Timeline, extent, replicas_of
from lightning_pipeline.schedules.validation import (
    MAX_PROCESSES,
    MAX_TIME,
    MAX_TRACE_BYTES,
    ScheduleError,
    read_text,
    shown,
)
from lightning_pipeline.schedules.waits import live_over_time


def load_chrome_trace(path: str | PathLike[str]) -> list[list[tuple[Action, float, float]]]:
    """Read a timeline that :func:`save_chrome_trace` wrote, in seconds; all-reduces are left out.

    Raises:
        ScheduleError: the file is no such trace.
    """
    try:
        content = json.loads(read_text(path, kind="a trace of a pipeline", most=MAX_TRACE_BYTES))
        spans = [event for event in content["traceEvents"] if event["ph"] == "X" and event.get("pid", 0) == 0]
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
    kept: Mapping[int, float] | None = None,
    offload: float = 0,
) -> Path:
    """Write every action, sends and receives too, as a complete event, one thread for each rank.

    Arrows lead from each send to the computation that uses what was sent, and each rank has a counter of its live
    activations, and of their bytes. All-reduces, of which several may be under way at once, are asynchronous events, on
    a track of each rank's own.

    Args:
        timeline: for each rank, its actions with their times.
        path: the file, usually ``*.json``.
        unit: seconds in one unit of the timeline's times; the first action starts at 0 in the file.
        reductions: for each rank, the start and end of the all-reduce of each bucket of gradients.
        labels: the ranks' names; default: ``"rank 0"`` and so on.
        kept: bytes that each virtual stage keeps of a micro-batch; without them only the activations are counted.
        offload: the share of activations that goes to host memory while they wait (`simulate`).

    Returns:
        ``path``.

    Raises:
        ScheduleError: if there are no actions.
    """
    begin, _ = extent(timeline)
    live = live_over_time(timeline, kept, offload)

    def event(rank: int, name: str, phase: str, time: float, **others: object) -> dict[str, object]:
        microseconds = (time - begin) * unit * 1e6
        return {"name": name, "ph": phase, "pid": 0, "tid": rank, "ts": microseconds, **others}

    events: list[dict[str, object]] = []
    for rank, row in enumerate(timeline):
        label = labels[rank] if labels else f"rank {rank}"
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": label}})
        for action, start, stop in row:
            where = {"stage": action.stage, "microbatch": action.microbatch}
            length = (stop - start) * unit * 1e6
            events.append(event(rank, str(action), "X", start, dur=length, cat=action.kind.value, args=where))
        for bucket, span in enumerate(reductions[rank] if reductions else ()):
            for phase, time in zip("be", span, strict=True):
                of_bucket = {"cat": "all-reduce", "id": f"{rank}.{bucket}", "args": {"bucket": bucket}}
                events.append(event(rank, f"all-reduce, {label}", phase, time, **of_bucket))
        for time, count, size in live[rank]:
            events.append(event(rank, f"live activations, {label}", "C", time, args={"count": count}))
            if kept:
                events.append(event(rank, f"bytes of live activations, {label}", "C", time, args={"bytes": size}))
    for number, (sender, sent, user, used) in enumerate(_arrows(timeline)):
        events.append(event(sender, "transfer", "s", sent, cat="transfer", id=number))
        events.append(event(user, "transfer", "f", used, cat="transfer", id=number, bp="e"))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def _arrows(timeline: Timeline) -> Iterator[tuple[int, float, int, float]]:
    """For each value that was sent: the sender and a time within the send, its user and when that starts."""
    for rows in replicas_of(timeline):
        sent: dict[Action, tuple[int, float]] = {}
        for rank in rows:
            for action, start, end in timeline[rank]:
                if action.kind in SENDS:
                    sent[sent_by(action)] = rank, (start + end) / 2
        num_stages = 1 + max((action.stage for rank in rows for action, _, _ in timeline[rank]), default=0)
        for rank in rows:
            for action, start, _ in timeline[rank]:
                for value in needs(action, num_stages) if action.kind.is_compute else ():
                    if value in sent and sent[value][0] != rank:
                        yield *sent[value], rank, start
