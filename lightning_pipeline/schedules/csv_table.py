"""Schedules as CSV files, in the compute-only format of torch.distributed.pipelining."""

from __future__ import annotations

import csv
import io
from os import PathLike
from pathlib import Path

from lightning_pipeline.schedules.action import Action
from lightning_pipeline.schedules.custom import infer_placement, read_compute
from lightning_pipeline.schedules.drawing import time_slots
from lightning_pipeline.schedules.errors import ScheduleError
from lightning_pipeline.schedules.limits import MAX_ACTIONS, MAX_CSV_BYTES, MAX_RANKS
from lightning_pipeline.schedules.schedule import Schedule
from lightning_pipeline.schedules.text_file import read_text


def load_csv(path: str | PathLike[str]) -> Schedule:
    """Read a schedule: a row for each rank, a cell such as ``0F0`` for each action; empty cells are idle time.

    A virtual stage is placed on the first rank that names it. The file is not checked further: see ``check``.

    Raises:
        ScheduleError: it is no CSV file or a larger one than any schedule (``limits``), has a cell that is no compute
            action or a stage that no rank names, or is empty. Names the file.
        OSError: it cannot be read.
    """
    path = Path(path)
    orders: list[list[Action]] = []
    num_actions = 0
    try:
        text = read_text(path, kind="a CSV file", most=MAX_CSV_BYTES)
        for row, cells in enumerate(csv.reader(io.StringIO(text, newline="")), 1):
            order = [
                read_compute(cell, f"{path}, row {row}, column {column}")
                for column, cell in enumerate(cells, 1)
                if cell.strip()
            ]
            num_actions += len(order)
            if order and (row > MAX_RANKS or num_actions > MAX_ACTIONS):
                raise ScheduleError(
                    f"{path} is larger than any schedule: it has actions in row {row}, {num_actions:,} so far, and "
                    f"may have {MAX_RANKS:,} rows and {MAX_ACTIONS:,} actions"
                )
            if order:
                orders += [[] for _ in range(row - 1 - len(orders))]  # ranks without actions
                orders.append(order)
    except ScheduleError:
        raise
    except csv.Error as error:
        raise ScheduleError(f"{path} is not a CSV file: {error}") from None
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    if not orders:
        raise ScheduleError(f"{path} holds no actions; write one row for each rank with cells such as 0F0")
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
