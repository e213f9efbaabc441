"""A schedule as a picture in text, time to the right."""

from __future__ import annotations

from lightning_pipeline.schedules.action import Action, Kind
from lightning_pipeline.schedules.grid import format_grid
from lightning_pipeline.schedules.schedule import Schedule
from lightning_pipeline.schedules.simulation import simulate


def time_slots(schedule: Schedule) -> list[list[Action | None]]:
    """For each rank, what it does in each slot of time, None where it is idle; sends and receives take no time.

    Every action takes one slot. Only where the schedule also splits backwards into I and W does B take two.
    """
    has_split = any(action.kind is Kind.I for order in schedule.orders for action in order)
    half = 1.0 if has_split else 0.5
    rows: list[list[Action | None]] = []
    for spans in simulate(schedule, input_grad=half, weight_grad=half).spans:
        row: list[Action | None] = []
        for action, start, end in spans:
            row += [None] * (int(start) - len(row)) + [action] * int(end - start)
        rows.append(row)
    return rows


def render(schedule: Schedule) -> str:
    """Draw the schedule: a row for each rank, a column for each slot of time, a dot where a rank is idle.

    The drawing is of unit costs: F takes one column, and so does B, or two next to backwards split into I and W.

    Raises:
        ScheduleError: if the schedule deadlocks.
    """
    return format_grid([[str(action or ".") for action in row] for row in time_slots(schedule)])
