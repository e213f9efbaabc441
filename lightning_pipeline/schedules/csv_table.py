"""Schedules as CSV files, in the compute-only format of torch.distributed.pipelining."""

from __future__ import annotations

import csv
from os import PathLike
from pathlib import Path

from lightning_pipeline.schedules.custom import infer_placement, read_compute
from lightning_pipeline.schedules.drawing import time_slots
from lightning_pipeline.schedules.errors import ScheduleError
from lightning_pipeline.schedules.schedule import Schedule


def load_csv(path: str | PathLike[str]) -> Schedule:
    """Read a schedule: a row for each rank, a cell such as ``0F0`` for each action; empty cells are idle time.

    A virtual stage is placed on the first rank that names it. The file is not checked further: see ``check``.

    Raises:
        ScheduleError: for a cell that is no compute action, a stage that no rank names, or an empty file.
    """
    path = Path(path)
    # Spreadsheets put a byte order mark in front.
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise ScheduleError(f"{path} holds no actions; write one row for each rank with cells such as 0F0")
    orders = [
        [
            read_compute(cell, f"{path}, row {row}, column {column}")
            for column, cell in enumerate(cells, 1)
            if cell.strip()
        ]
        for row, cells in enumerate(rows, 1)
    ]
    return Schedule(
        name=path.stem,
        orders=tuple(map(tuple, orders)),
        num_microbatches=1 + max(action.microbatch for order in orders for action in order),
        placement=infer_placement(orders, str(path)),
    )


def save_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a schedule, a column for each slot of time as :func:`render` draws it.

    Raises:
        ScheduleError: if the schedule is lowered (the format holds compute actions only) or deadlocks.
    """
    if schedule.lowered:
        raise ScheduleError(f"schedule {schedule.name!r} is lowered; save it as it was before, or save its .compute()")
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for row in time_slots(schedule):
            # An action that takes two slots is written once: a reader would take a second cell for a second action.
            writer.writerow(
                "" if action is None or (column and row[column - 1] == action) else str(action)
                for column, action in enumerate(row)
            )
