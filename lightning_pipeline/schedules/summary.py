"""Schedules that are too large for a grid, in brief: as a few ranks' phases, and as a thumbnail of their time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lightning_pipeline.schedules.schedule import Action, Kind, Schedule
from lightning_pipeline.schedules.timeline import (
    IDLE_COLOUR,
    LEGEND,
    Timeline,
    draw_legend,
    require_matplotlib,
    some_of,
)

MAX_GRID_PASSES = 4096
"""Virtual stages times micro-batches; what has more is shown in brief on a terminal."""
IDLE = "."
MIXED = "="
_PURE = 0.9  # of a cell's busy time that one kind has for the cell to have its letter
_LONGEST_PERIOD, _MOST_PHASES = 12, 12
_REPEATED = [re.compile(rf"(.{{{period}}})\1*", re.DOTALL) for period in range(1, _LONGEST_PERIOD + 1)]

Shares = dict[Kind, float]
"""Of a cell's time, by what a rank does in it; the rest is idle."""


def phases(order: Sequence[Action]) -> str:
    """An order as what is repeated, and how often, such as ``3 F, 5 (F B), 3 B``; stages are left out."""
    kinds = "".join(action.kind.value for action in order)
    found: list[str] = []
    start = 0
    while start < len(kinds):
        period, times = kinds[start], 1
        for pattern in _REPEATED:
            match = pattern.match(kinds, start)
            # The shortest of those that cover as much.
            if match and match[0] != match[1] and len(match[0]) > len(period) * times:
                period, times = match[1], len(match[0]) // len(match[1])
        found.append(f"{times} ({' '.join(period)})" if len(period) > 1 else f"{times} {period}")
        start += len(period) * times
    return ", ".join(found[:_MOST_PHASES] + ["..."] * (len(found) > _MOST_PHASES))


def shares(row: Sequence[tuple[Action, float, float]], begin: float, cell: float, columns: int) -> list[Shares]:
    """What a rank does in each of `columns` cells of as much time each, from `begin` on."""
    cells: list[Shares] = [{} for _ in range(columns)]
    for action, start, end in row:
        column = min(int((start - begin) / cell), columns - 1)
        at = start
        while at < end:
            until = min(end, begin + (column + 1) * cell) if column < columns - 1 else end
            of_cell = cells[column]
            of_cell[action.kind] = of_cell.get(action.kind, 0.0) + (until - at) / cell
            at, column = until, column + 1
    return cells


def thumbnail(timeline: Timeline, makespan: float, *, rows: int = 16, columns: int = 66) -> list[tuple[int, str]]:
    """Some ranks, each with a line of letters: what it does in a cell, ``=`` several kinds, ``.`` mostly idle."""
    cell = makespan / columns

    def letter(of_cell: Shares) -> str:
        busy = sum(of_cell.values())
        if busy < 0.5:
            return IDLE
        kind, share = max(of_cell.items(), key=lambda item: item[1])
        return kind.value if share >= _PURE * busy else MIXED

    return [
        (rank, "".join(map(letter, shares(timeline[rank], 0.0, cell, columns))))
        for rank in some_of(len(timeline), rows)
    ]


def summarize(schedule: Schedule, timeline: Timeline, makespan: float) -> str:
    """A schedule and its simulated time in some forty lines, whatever its size."""
    ranks, width = schedule.num_ranks, len(str(schedule.num_ranks - 1))
    picture = thumbnail(timeline, makespan)
    text = [f"rank {rank:>{width}}  {line}" for rank, line in picture]
    legend = f"{makespan / len(picture[0][1]):.4g} of time a column; {MIXED} several kinds, {IDLE} mostly idle"
    by_phases = {rank: phases(schedule.orders[rank]) for rank in some_of(ranks, 5)}
    of_ranks = [f"rank {rank:>{width}}  {found}" for rank, found in by_phases.items()]
    return "\n".join([f"{len(picture)} of {ranks} ranks; {legend}", *text, "", "in phases", *of_ranks])


def save_overview(timeline: Timeline, path: Path, makespan: float, *, title: str = "") -> None:
    """Draw what :func:`save_picture` has no room for: some ranks, each cell in the mixed colour of what it has."""
    require_matplotlib()
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    ranks = some_of(len(timeline), 64)
    columns = 480
    colours = {kind: to_rgb(hues[0]) for kind, (_, hues) in LEGEND.items()}

    def mixed(cell: Shares) -> list[float]:
        idle = max(0.0, 1 - sum(cell.values()))
        parts = [(idle, to_rgb(IDLE_COLOUR)), *((share, colours[kind]) for kind, share in cell.items())]
        total = sum(share for share, _ in parts)
        return [sum(share * colour[index] for share, colour in parts) / total for index in range(3)]

    pixels = [[mixed(cell) for cell in shares(timeline[rank], 0.0, makespan / columns, columns)] for rank in ranks]
    axes = figure.add_subplot()
    axes.imshow(pixels, aspect="auto", interpolation="nearest", extent=(0, makespan, len(ranks) - 0.5, -0.5))
    shown = some_of(len(ranks), 9)
    axes.set_yticks(shown, [f"rank {ranks[index]}" for index in shown])
    axes.set_xlabel("time")
    axes.set_title(title, loc="left", fontsize=11)
    draw_legend(figure, [timeline[0]])
    figure.savefig(path, dpi=120)


def spread(values: Sequence[float], most: int = 16) -> str:
    """Numbers of ranks: all of them if they are few, runs of equal ones, or the greatest, the least and the mean."""
    if len(values) <= most:
        return " ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values)
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    if len(runs) <= 3:
        return ", ".join(f"{count} x {value:.6g}" for value, count in runs)
    return f"{max(values):.6g} to {min(values):.6g}, mean {sum(values) / len(values):.6g}"
