"""What each rank did when, simulated or recorded: as numbers, as a picture and as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_pipeline.schedules.schedule import Action, Kind
from lightning_pipeline.schedules.validation import (
    MAX_PICTURE_RANKS,
    MAX_PROCESSES,
    MAX_TIME,
    MAX_TRACE_BYTES,
    ScheduleError,
    read_text,
    shown,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    """The share of the all-reduces' time that passes before the last action's end, 0 to 1; 1.0 without all-reduces.

    The rest is what all-reduces add to the step.

    Raises:
        ScheduleError: if there are no actions.
    """
    _, end = extent(timeline)
    spans = [span for row in reductions for span in one_at_a_time(row)]
    total = sum(stop - start for start, stop in spans)
    overlapped = sum(max(0.0, min(stop, end) - start) for start, stop in spans)
    return overlapped / total if total > 0 else 1.0


def one_at_a_time(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans that cover the same time, by their ends: each from its start, or from the end of the one before.

    Buckets that start together are transferred one after another, about in these spans.
    """
    shares: list[tuple[float, float]] = []
    for start, end in sorted(spans, key=lambda span: span[1]):
        shares.append((max(start, shares[-1][1]) if shares else start, end))
    return shares


def load_chrome_trace(path: str | PathLike[str]) -> list[list[tuple[Action, float, float]]]:
    """Read a timeline that :func:`save_chrome_trace` wrote, in seconds; all-reduces are left out.

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
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


Colour = tuple[float, float, float]

LEGEND: dict[Kind, tuple[str, Colour]] = {
    Kind.F: ("forward", (0.18, 0.40, 0.66)),
    Kind.B: ("backward", (0.85, 0.42, 0.08)),
    Kind.I: ("input gradients", (0.74, 0.20, 0.29)),
    Kind.W: ("weight gradients", (0.20, 0.53, 0.31)),
}
"""What each kind is called, and its colour on a rank's first virtual stage; on later ones it is paler."""
_REDUCTION: Colour = (0.48, 0.32, 0.64)
IDLE_COLOUR: Colour = (0.93, 0.93, 0.93)
_GREY: Colour = (0.35, 0.35, 0.35)
_PALEST = 0.65
_MOST_SHADES = 16  # that the legend lists; more cannot be told apart
_BOX_HEIGHT, _STRIP_HEIGHT = 0.84, 0.18  # of a row; the strip of the all-reduces is below the boxes

_INCHES_PER_ROW, _INCHES_PER_STRIP = 0.36, 0.1
_INCHES_PER_BOX, _MIN_INCHES, _MAX_INCHES = 0.24, 9.0, 30.0
_MAX_POINTS, _MIN_POINTS = 9.0, 4.5
# A digit's width and the margin beside a number, in font sizes.
_DIGIT, _MARGIN = 0.64, 0.5


def save_picture(
    timeline: Timeline,
    path: str | PathLike[str],
    *,
    title: str = "",
    time_label: str = "time",
    reductions: Reductions = (),
    labels: Sequence[str] = (),
) -> Path:
    """Draw the compute actions as boxes with their micro-batch's number; needs matplotlib.

    The colour tells forward, backward, input and weight gradients, the shade tells the virtual stage on the rank, and
    idle time is grey. The title ends with the bubble. All-reduces of gradients are a strip below a rank's boxes, which
    may go on after the last action.

    Args:
        timeline: for each rank, its actions with their times; times count from the first start.
        path: the file; its ending, ``.svg`` or ``.png``, chooses the format.
        title: what the picture shows.
        time_label: the unit of the times.
        reductions: for each rank, the start and end of the all-reduce of each bucket of gradients.
        labels: the ranks' names; default: ``"rank 0"`` and so on.

    Returns:
        ``path``.

    Raises:
        ScheduleError: if there are no actions, or more ranks than a picture has room for.
        ModuleNotFoundError: where matplotlib cannot be imported.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    path = Path(path)
    if len(timeline) > MAX_PICTURE_RANKS:
        raise ScheduleError(
            f"a picture has room for {MAX_PICTURE_RANKS} ranks, got {len(timeline)}; write a trace (.json) instead, "
            f"which viewers scroll through"
        )
    begin, end = extent(timeline)
    duration = max([end, *(stop for row in reductions for _, stop in row)]) - begin or 1
    inches = _width(timeline, duration)
    inches_per_row = _INCHES_PER_ROW + _INCHES_PER_STRIP * any(reductions)
    # Text stays text in an SVG, and the same timeline gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-pipeline"}):
        figure = Figure(figsize=(inches, 1.5 + inches_per_row * len(timeline)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlim(0, duration)
        axes.set_ylim(len(timeline) - 0.5, -0.5)
        strip = _STRIP_HEIGHT if any(reductions) else 0.0
        _draw_boxes(axes, timeline, points_per_unit=(inches - 1) * 72 / duration, height=_BOX_HEIGHT - strip)
        _draw_strips(axes, reductions, begin)
        axes.set_yticks(range(len(timeline)), labels or [f"rank {rank}" for rank in range(len(timeline))])
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_xlabel(time_label)
        axes.set_title(f"{title}{', ' * bool(title)}bubble {idle_share(timeline):.1%}", loc="left", fontsize=11)
        draw_legend(figure, timeline, reductions)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def require_matplotlib() -> None:
    """Raise a ModuleNotFoundError that says what to install, where pictures cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError(
            f"a picture needs matplotlib, which cannot be imported ({error}): pip install lightning-pipeline[plot]"
        ) from error


def _width(timeline: Timeline, duration: float) -> float:
    """Inches: enough for a number in a usual box, within reason."""
    lengths = [stop - start for row in timeline for action, start, stop in row if action.kind.is_compute]
    usual = median(lengths) if lengths else 0.0
    return min(max(_MIN_INCHES, 1 + _INCHES_PER_BOX * duration / usual), _MAX_INCHES) if usual else _MIN_INCHES


def _draw_boxes(axes: Axes, timeline: Timeline, *, points_per_unit: float, height: float) -> None:
    begin, end = extent(timeline)
    top = -_BOX_HEIGHT / 2
    boxes: dict[tuple[int, Colour], list[tuple[float, float]]] = {}
    numbers: list[tuple[float, int, str, float, Colour]] = []
    for rank, row in enumerate(timeline):
        boxes[rank, IDLE_COLOUR] = [(0.0, end - begin)]
        local = _local_stages(row)
        for action, start, stop in row:
            if not action.kind.is_compute:
                continue
            colour = _shade(LEGEND[action.kind][1], local[action.stage], len(local))
            boxes.setdefault((rank, colour), []).append((start - begin, stop - start))
            text = str(action.microbatch)
            points = (stop - start) * points_per_unit / (_DIGIT * len(text) + _MARGIN)
            numbers.append(((start + stop) / 2 - begin, rank, text, points, colour))
    for (rank, colour), spans in boxes.items():
        edge = "none" if colour == IDLE_COLOUR else "white"
        axes.broken_barh(spans, (rank + top, height), facecolor=colour, edgecolor=edge, linewidth=0.6)
    # One size for all: such that only numbers in the narrowest tenth of the boxes may have to be left out.
    fitting = sorted(points for *_, points, _ in numbers)
    size = min(max(fitting[len(fitting) // 10], _MIN_POINTS), _MAX_POINTS) if fitting else _MAX_POINTS
    for x, rank, text, points, colour in numbers:
        if points >= size:
            ink = "black" if _is_pale(colour) else "white"
            middle = rank + top + height / 2
            axes.text(x, middle, text, ha="center", va="center_baseline", fontsize=size, color=ink)


def _draw_strips(axes: Axes, reductions: Reductions, begin: float) -> None:
    top = _BOX_HEIGHT / 2 - _STRIP_HEIGHT
    for rank, row in enumerate(reductions):
        bars = [(start - begin, stop - start) for start, stop in one_at_a_time(row)]
        axes.broken_barh(bars, (rank + top, _STRIP_HEIGHT), facecolor=_REDUCTION, edgecolor="white", linewidth=0.6)


def draw_legend(figure: Figure, timeline: Timeline, reductions: Reductions = ()) -> None:
    """Say below a figure what the colours of this timeline's actions mean."""
    from matplotlib.patches import Patch

    present = {action.kind for row in timeline for action, _, _ in row}
    patches = [Patch(color=colour, label=label) for kind, (label, colour) in LEGEND.items() if kind in present]
    most = max(len(_local_stages(row)) for row in timeline)
    if 1 < most <= _MOST_SHADES:
        patches += [
            Patch(color=_shade(_GREY, index, most), label=f"virtual stage {index} of a rank") for index in range(most)
        ]
    patches.append(Patch(color=IDLE_COLOUR, label="idle"))
    if any(reductions):
        patches.append(Patch(color=_REDUCTION, label="all-reduce of gradients"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)


def _local_stages(row: Sequence[tuple[Action, float, float]]) -> dict[int, int]:
    """The virtual stages on a rank, numbered from 0 in the order of the data."""
    return {stage: index for index, stage in enumerate(sorted({action.stage for action, _, _ in row}))}


def _shade(colour: Colour, index: int, count: int) -> Colour:
    white = _PALEST * index / (count - 1) if count > 1 else 0.0
    red, green, blue = (part + (1 - part) * white for part in colour)
    return red, green, blue


def _is_pale(colour: Colour) -> bool:
    red, green, blue = colour
    return 0.30 * red + 0.59 * green + 0.11 * blue > 0.6
