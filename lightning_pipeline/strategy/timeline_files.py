"""Recorded actions as a Chrome trace, as a picture, and as one number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipeline.runtime.executor import Span

_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#e45756", "W": "#54a24b"}


def measured_bubble(stages: Sequence[Sequence[Span]]) -> float:
    """The share of all stages' time, from the first action's start to the last one's end, without computation."""
    begin, end = _extent(stages)
    busy = sum(stop - start for spans in stages for action, start, stop in spans if action.kind.is_compute)
    return 1 - busy / ((end - begin) * len(stages))


def write_chrome_trace(stages: Sequence[Sequence[Span]], path: Path) -> Path:
    """Write the actions as complete events, one thread a stage, times in microseconds. Returns `path`."""
    begin, _ = _extent(stages)
    events: list[dict[str, object]] = []
    for stage, spans in enumerate(stages):
        name = {"name": f"stage {stage}"}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": name})
        for action, start, stop in spans:
            events.append(
                {
                    "name": str(action),
                    "cat": action.kind.value,
                    "ph": "X",
                    "pid": 0,
                    "tid": stage,
                    "ts": (start - begin) * 1e6,
                    "dur": (stop - start) * 1e6,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def draw_timeline(stages: Sequence[Sequence[Span]], path: Path) -> Path | None:
    """Draw the computing actions, one row a stage. Returns `path`, or None where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        rank_zero_warn("the timeline is not drawn: install matplotlib, or `pip install lightning-pipeline[examples]`")
        return None
    begin, end = _extent(stages)
    figure = Figure(figsize=(12, 0.9 + 0.7 * len(stages)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for stage, spans in enumerate(stages):
        for action, start, stop in spans:
            if not action.kind.is_compute:
                continue
            left, width = (start - begin) * 1e3, (stop - start) * 1e3
            axes.barh(stage, width, left=left, height=0.8, color=_COLOURS[action.kind.value], edgecolor="white")
            if width > (end - begin) * 1e3 / 60:
                axes.text(left + width / 2, stage, str(action.microbatch), ha="center", va="center", color="white")
    axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
    axes.invert_yaxis()
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_xlabel("milliseconds")
    axes.set_title(f"forward (blue) and backward (orange) by micro-batch; bubble {measured_bubble(stages):.1%}")
    figure.savefig(path, dpi=120)
    return path


def _extent(stages: Sequence[Sequence[Span]]) -> tuple[float, float]:
    return (
        min(start for spans in stages for _, start, _ in spans),
        max(stop for spans in stages for _, _, stop in spans),
    )
