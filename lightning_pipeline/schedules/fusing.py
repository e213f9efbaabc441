"""Halves of a backward that follow one another, as the whole that they are."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipeline.schedules.action import Action, Kind
from lightning_pipeline.schedules.schedule import Schedule


def fuse(schedule: Schedule) -> Schedule:
    """Turn each I that its own W follows at once into a B::

        1F0 1I0 1W0 1F1 1I1 1F2 1W1  ->  1F0 1B0 1F1 1I1 1F2 1W1

    Nothing is put between such halves, and a backward in one goes takes less time than in two; the rank before gets
    its gradient later by the time of W.
    """
    orders = []
    for order in schedule.orders:
        fused: list[Action] = []
        for action in order:
            last = fused[-1] if fused else None
            if action.kind is Kind.W and last == Action(Kind.I, action.stage, action.microbatch):
                fused[-1] = Action(Kind.B, action.stage, action.microbatch)
            else:
                fused.append(action)
        orders.append(tuple(fused))
    return replace(schedule, orders=tuple(orders))
