"""Schedules by users: lists of actions, or CSV files in torch.distributed.pipelining's format."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from lightning_pipeline.schedules.schedule import Action, Schedule
from lightning_pipeline.schedules.simulation import time_slots
from lightning_pipeline.schedules.validation import (
    MAX_ACTIONS,
    MAX_CSV_BYTES,
    MAX_RANKS,
    ScheduleError,
    read_text,
    shown,
)


def as_schedule(
    value: Schedule | Sequence[Sequence[Action | str | None]], *, name: str, num_microbatches: int
) -> Schedule:
    """Make a schedule of one list for each rank; a Schedule is returned as it is.

    A virtual stage is placed on the first rank that names it. The result is not checked further: see ``check``.

    Args:
        value: for each rank, compute actions in order, as Actions or text such as ``"0F0"``; None and empty text are
            idle time and left out.

    Raises:
        ScheduleError: for anything else, a stage that no rank names, or a Schedule of another number of micro-batches.
    """
    if isinstance(value, Schedule):
        if value.num_microbatches != num_microbatches:
            raise ScheduleError(
                f"schedule {name!r} is for {value.num_microbatches} micro-batches, but a step has {num_microbatches}; "
                f"build it for {num_microbatches}"
            )
        return value
    if not _is_list(value) or not all(map(_is_list, value)):
        raise ScheduleError(
            f"schedule {name!r} must be a Schedule, or one list for each rank of Actions or text such as '0F0', "
            f"got {shown(value)}"
        )
    orders = [
        [
            read_compute(cell, f"schedule {name!r}, rank {rank}, position {position}")
            for position, cell in enumerate(row)
            if cell is not None and cell != ""
        ]
        for rank, row in enumerate(value)
    ]
    if not any(orders):
        raise ScheduleError(f"schedule {name!r} holds no actions; give one list for each rank, such as ['0F0', '0B0']")
    return Schedule(name, tuple(map(tuple, orders)), num_microbatches, infer_placement(orders, f"schedule {name!r}"))


def read_compute(cell: Action | str, where: str) -> Action:
    """A compute action from an Action or its text.

    Raises:
        ScheduleError: that starts with ``where``, for anything else.
    """
    if isinstance(cell, str):
        try:
            cell = Action.parse(cell)
        except ScheduleError as error:
            raise ScheduleError(f"{where}: {error}") from None
    elif not isinstance(cell, Action):
        raise ScheduleError(f"{where}: expected an Action or text such as '0F0', got {shown(cell)}")
    if not cell.kind.is_compute:
        raise ScheduleError(f"{where}: {cell} is communication; write compute actions only, the rest is added")
    return cell


def infer_placement(orders: Sequence[Sequence[Action]], where: str) -> tuple[int, ...]:
    """For each virtual stage, the first rank that names it.

    Raises:
        ScheduleError: that starts with ``where``, if no rank names a stage.
    """
    place: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            place.setdefault(action.stage, rank)
    if missing := sorted(set(range(max(place))) - set(place)):
        raise ScheduleError(f"{where} has no action of stage {missing[0]}, but of stage {max(place)}")
    return tuple(place[stage] for stage in range(len(place)))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def load_csv(path: str | PathLike[str]) -> Schedule:
    """Read a schedule: a row for each rank, a cell such as ``0F0`` for each action; empty cells are idle time.

    A virtual stage is placed on the first rank that names it. The file is not checked further: see ``check``.

    Raises:
        ScheduleError: it is not a CSV file, is larger than any schedule (``validation``), has a cell that is not a
            compute action or a stage that no rank names, or is empty. Names the file.
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
