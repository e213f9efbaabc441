"""Ranks as rows, actions as columns: the text that schedules and their errors are printed in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest

# A marked grid wider than this is cut to the columns around its first mark.
_MAX_MARKED_COLUMNS = 24


def format_grid(rows: Sequence[Sequence[str]]) -> str:
    """One line for each rank, its cells centred in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    label = len(str(len(rows) - 1))
    return "\n".join(
        f"rank {rank:>{label}}  "
        + " ".join(cell.center(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for rank, row in enumerate(rows)
    )


def format_marked(rows: Sequence[Sequence[str]], marks: Collection[tuple[int, int]]) -> str:
    """The grid with each ``(rank, column)`` of ``marks`` shown as ``>cell<``."""
    marked = [
        [f">{cell}<" if (rank, column) in marks else cell for column, cell in enumerate(row)]
        for rank, row in enumerate(rows)
    ]
    if max(map(len, marked)) <= _MAX_MARKED_COLUMNS or not marks:
        return format_grid(marked)
    first = max(0, min(column for _, column in marks) - _MAX_MARKED_COLUMNS // 3)
    last = first + _MAX_MARKED_COLUMNS
    return format_grid(
        [["..."] * (first > 0) + row[first:last] + ["..."] * (len(row) > last) for row in marked],
    )
