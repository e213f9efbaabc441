"""A timeline as an SVG or PNG picture: a row for each rank, time to the right."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lightning_pipeline.schedules.action import Action, Kind
from lightning_pipeline.schedules.errors import ScheduleError
from lightning_pipeline.schedules.limits import MAX_PICTURE_RANKS
from lightning_pipeline.schedules.timeline import Reductions, Timeline, extent, idle_share, one_at_a_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

# Kind, what the legend calls it, and its colour on a rank's first virtual stage; on later ones it is paler.
_LEGEND: dict[Kind, tuple[str, Colour]] = {
    Kind.F: ("forward", (0.18, 0.40, 0.66)),
    Kind.B: ("backward", (0.85, 0.42, 0.08)),
    Kind.I: ("input gradients", (0.74, 0.20, 0.29)),
    Kind.W: ("weight gradients", (0.20, 0.53, 0.31)),
}
_REDUCTION: Colour = (0.48, 0.32, 0.64)
_IDLE: Colour = (0.93, 0.93, 0.93)
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
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            f"a picture needs matplotlib, which cannot be imported ({error}): pip install lightning-pipeline[examples]"
        ) from error
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
        _draw_legend(figure, timeline, reductions)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


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
        boxes[rank, _IDLE] = [(0.0, end - begin)]
        local = _local_stages(row)
        for action, start, stop in row:
            if not action.kind.is_compute:
                continue
            colour = _shade(_LEGEND[action.kind][1], local[action.stage], len(local))
            boxes.setdefault((rank, colour), []).append((start - begin, stop - start))
            text = str(action.microbatch)
            points = (stop - start) * points_per_unit / (_DIGIT * len(text) + _MARGIN)
            numbers.append(((start + stop) / 2 - begin, rank, text, points, colour))
    for (rank, colour), spans in boxes.items():
        edge = "none" if colour == _IDLE else "white"
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


def _draw_legend(figure: Figure, timeline: Timeline, reductions: Reductions) -> None:
    from matplotlib.patches import Patch

    present = {action.kind for row in timeline for action, _, _ in row}
    patches = [Patch(color=colour, label=label) for kind, (label, colour) in _LEGEND.items() if kind in present]
    most = max(len(_local_stages(row)) for row in timeline)
    if 1 < most <= _MOST_SHADES:
        patches += [
            Patch(color=_shade(_GREY, index, most), label=f"virtual stage {index} of a rank") for index in range(most)
        ]
    patches.append(Patch(color=_IDLE, label="idle"))
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
