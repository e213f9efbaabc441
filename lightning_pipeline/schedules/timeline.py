"""What each rank did when, simulated or recorded: as numbers and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from lightning_pipeline.schedules.schedule import Action, Kind
from lightning_pipeline.schedules.validation import (
    MAX_PICTURE_RANKS,
    ScheduleError,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Timeline = Sequence[Sequence[tuple[Action, float, float]]]
"""For each rank, its actions with the times they start and end: ``Simulation.spans``, or what a run recorded."""

Reductions = Sequence[Sequence[tuple[float, float]]]
"""For each rank, when the all-reduces of its gradients over replicas start and end, one for each bucket."""


def some_of(count: int, most: int) -> list[int]:
    """At most `most` numbers below `count`, evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def replicas_of(timeline: Timeline) -> list[range]:
    """The rows of each pipeline: one begins where a virtual stage comes again."""
    begins: list[int] = []
    seen: set[int] = set()
    for rank, row in enumerate(timeline):
        stages = {action.stage for action, _, _ in row}
        if not begins or stages & seen:
            begins.append(rank)
            seen = set()
        seen |= stages
    return [range(*rows) for rows in pairwise([*begins, len(timeline)])]


def extent(timeline: Timeline) -> tuple[float, float]:
    """The first start and the last end."""
    spans = [span for row in timeline for span in row]
    if not spans:
        raise ScheduleError(f"a timeline of {len(timeline)} ranks without any action has no beginning and no end")
    return min(start for _, start, _ in spans), max(end for _, _, end in spans)


def idle_share(timeline: Timeline) -> float:
    """The share of all ranks' time, from the first start to the last end, that is not computation: 0 to 1."""
    begin, end = extent(timeline)
    busy = sum(stop - start for row in timeline for action, start, stop in row if action.kind.is_compute)
    return 1 - busy / ((end - begin) * len(timeline)) if end > begin else 0.0


def slowest_stage(timeline: Timeline) -> int:
    """The virtual stage that computes for the longest time."""
    busy: dict[int, float] = defaultdict(float)
    for action, start, end in (span for row in timeline for span in row if span[0].kind.is_compute):
        busy[action.stage] += end - start
    return max(busy, key=busy.__getitem__)


def overlapped_share(timeline: Timeline, reductions: Reductions) -> float:
    """The share of the all-reduces' time that passes before the last action's end, 0 to 1; 1.0 without all-reduces.

    The rest is what all-reduces add to the step.
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


# Kind, what the legend calls it, and its hues on a rank's virtual stages, in turn. The colours of Okabe and Ito (2008),
# which colour-blind people tell apart, and two of the same kind for the gradients.
LEGEND: dict[Kind, tuple[str, tuple[str, str]]] = {
    Kind.F: ("forward", ("#0072b2", "#56b4e9")),
    Kind.B: ("backward", ("#d55e00", "#e69f00")),
    Kind.I: ("input gradients", ("#cc79a7", "#882255")),
    Kind.W: ("weight gradients", ("#009e73", "#b3c833")),
}
_DARK = frozenset(("#0072b2", "#d55e00", "#882255", "#009e73"))
_HATCHES = ("", "///", "\\\\\\", "xxx", "|||", "---", "+++")
_REDUCTION, IDLE_COLOUR, _GREYS = "#7a529f", "#ededed", ("#bdbdbd", "#8c8c8c")
_MOST_STAGES = 16  # that the legend lists
_BOX_HEIGHT, _STRIP_HEIGHT = 0.84, 0.18  # of a row; the strip of the all-reduces is below the boxes

_INCHES_PER_ROW, _INCHES_PER_STRIP = 0.36, 0.1
_INCHES_PER_BOX, _MIN_INCHES, _MAX_INCHES = 0.24, 9.0, {".svg": 60.0}
_MAX_POINTS, _READABLE_POINTS, _MIN_POINTS = 9.0, 6.0, 4.5
_GAP = 0.1  # of a box: a smaller one is not seen where boxes merge
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

    The colour tells forward, backward, input and weight gradients, hue and hatching tell the virtual stage on the rank,
    and idle time is grey. Where numbers would be too small to read, boxes that follow one another merge: ``0–15``. The
    title ends with the bubble. All-reduces of gradients are a strip below a rank's boxes, which may go on after the
    last action.

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
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(timeline) > MAX_PICTURE_RANKS:
        raise ScheduleError(
            f"a picture has room for {MAX_PICTURE_RANKS} ranks, got {len(timeline)}; write a trace (.json) instead, "
            f"which viewers scroll through"
        )
    begin, end = extent(timeline)
    duration = max([end, *(stop for row in reductions for _, stop in row)]) - begin or 1
    inches = _width(timeline, duration, _MAX_INCHES.get(path.suffix.lower(), 30.0))
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


def _width(timeline: Timeline, duration: float, most: float) -> float:
    """Inches: enough for a number in a usual box, within reason."""
    lengths = [stop - start for row in timeline for action, start, stop in row if action.kind.is_compute]
    usual = median(lengths) if lengths else 0.0
    return min(max(_MIN_INCHES, 1 + _INCHES_PER_BOX * duration / usual), most) if usual else _MIN_INCHES


def _draw_boxes(axes: Axes, timeline: Timeline, *, points_per_unit: float, height: float) -> None:
    begin, end = extent(timeline)
    top = -_BOX_HEIGHT / 2
    rows = [[_Box.of(span) for span in row if span[0].kind.is_compute] for row in timeline]
    if _size_of_numbers([box for row in rows for box in row], points_per_unit) < _READABLE_POINTS:
        rows = [_merged(row) for row in rows]
    boxes: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
    for rank, row in enumerate(rows):
        axes.broken_barh([(0.0, end - begin)], (rank + top, height), facecolor=IDLE_COLOUR, edgecolor="none")
        local = _local_stages(timeline[rank])
        for box in row:
            colour, hatch = _look(box.kind, local[box.stage])
            boxes.setdefault((rank, colour, hatch), []).append((box.start - begin, box.end - box.start))
    for (rank, colour, hatch), spans in boxes.items():
        where = rank + top, height
        axes.broken_barh(spans, where, facecolor=colour, edgecolor="white", linewidth=0.6, hatch=hatch)
    size = max(_size_of_numbers([box for row in rows for box in row], points_per_unit), _MIN_POINTS)
    for rank, row in enumerate(rows):
        local = _local_stages(timeline[rank])
        for box in row:
            if box.points(points_per_unit) < size:
                continue
            colour, hatch = _look(box.kind, local[box.stage])
            behind = {"facecolor": colour, "edgecolor": "none", "pad": 0.6} if hatch else None
            x, middle = (box.start + box.end) / 2 - begin, rank + top + height / 2
            ink = "white" if colour in _DARK else "black"
            axes.text(x, middle, box.text, ha="center", va="center_baseline", fontsize=size, color=ink, bbox=behind)


class _Box(NamedTuple):
    """What is drawn for an action, or for several in a row."""

    kind: Kind
    stage: int
    text: str
    start: float
    end: float
    last: int

    @classmethod
    def of(cls, span: tuple[Action, float, float]) -> _Box:
        action, start, end = span
        return cls(action.kind, action.stage, str(action.microbatch), start, end, action.microbatch)

    def points(self, points_per_unit: float) -> float:
        """The largest size of its text that fits."""
        return (self.end - self.start) * points_per_unit / (_DIGIT * len(self.text) + _MARGIN)


def _size_of_numbers(boxes: Sequence[_Box], points_per_unit: float) -> float:
    """One size for all: such that only numbers in the narrowest tenth of the boxes may have to be left out."""
    fitting = sorted(box.points(points_per_unit) for box in boxes)
    return min(fitting[len(fitting) // 10], _MAX_POINTS) if fitting else _MAX_POINTS


def _merged(row: Sequence[_Box]) -> list[_Box]:
    """Micro-batches that follow one another in the same way, without a gap worth seeing, as one box: ``0–15``."""
    found: list[_Box] = []
    for box in sorted(row, key=lambda box: box.start):
        before = found[-1] if found else None
        gap = box.start - before.end if before else 0.0
        if (
            before is not None
            and (before.kind, before.stage, before.last + 1) == (box.kind, box.stage, box.last)
            and gap < _GAP * (box.end - box.start)
        ):
            text = f"{before.text.partition('–')[0]}–{box.text}"
            found[-1] = before._replace(text=text, end=box.end, last=box.last)
        else:
            found.append(box)
    return found


def _draw_strips(axes: Axes, reductions: Reductions, begin: float) -> None:
    top = _BOX_HEIGHT / 2 - _STRIP_HEIGHT
    for rank, row in enumerate(reductions):
        bars = [(start - begin, stop - start) for start, stop in one_at_a_time(row)]
        axes.broken_barh(bars, (rank + top, _STRIP_HEIGHT), facecolor=_REDUCTION, edgecolor="white", linewidth=0.6)


def draw_legend(figure: Figure, timeline: Timeline, reductions: Reductions = ()) -> None:
    """Say below a figure what the colours of this timeline's actions mean."""
    from matplotlib.patches import Patch

    present = {action.kind for row in timeline for action, _, _ in row}
    patches = [Patch(color=colours[0], label=label) for kind, (label, colours) in LEGEND.items() if kind in present]
    most = max(len(_local_stages(row)) for row in timeline)
    if 1 < most <= _MOST_STAGES:
        for index in range(most):
            _, hatch = _look(Kind.F, index)
            label, grey = f"virtual stage {index} of a rank", _GREYS[index % 2]
            patches.append(Patch(facecolor=grey, edgecolor="white", hatch=hatch, label=label))
    patches.append(Patch(color=IDLE_COLOUR, label="idle"))
    if any(reductions):
        patches.append(Patch(color=_REDUCTION, label="all-reduce of gradients"))
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 8), frameon=False, fontsize=9)


def _local_stages(row: Sequence[tuple[Action, float, float]]) -> dict[int, int]:
    """The virtual stages on a rank, numbered from 0 in the order of the data."""
    return {stage: index for index, stage in enumerate(sorted({action.stage for action, _, _ in row}))}


def _look(kind: Kind, index: int) -> tuple[str, str]:
    """Colour and hatching of a rank's virtual stage, which is told by both."""
    return LEGEND[kind][1][index % 2], _HATCHES[index % len(_HATCHES)]
