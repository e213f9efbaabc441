"""Schedules that users write: one list of actions for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeline.schedules.action import Action
from lightning_pipeline.schedules.errors import ScheduleError, shown
from lightning_pipeline.schedules.schedule import Schedule


def as_schedule(
    value: Schedule | Sequence[Sequence[Action | str | None]], *, name: str, num_microbatches: int
) -> Schedule:
    """Make a schedule of one list for each rank; a Schedule is returned as it is.

    A virtual stage is placed on the first rank that names it. The result is not checked further: see ``check``.

    Args:
        value: for each rank, compute actions in the order it does them, as Actions or text such as ``"0F0"``; None and
            blank text are idle time and left out.
        name: what to call it in messages.
        num_microbatches: micro-batches in one step.

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
