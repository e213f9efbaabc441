"""Adds sends and receives to a schedule of compute actions."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipeline.schedules.schedule import Action, Kind, Schedule
from lightning_pipeline.schedules.simulation import message_of, simulate


def lower(schedule: Schedule) -> Schedule:
    """Add the sends and receives; a schedule that has them already is returned as it is.

    All ranks are walked together, in the order of a simulation with unit costs. When an action is done whose value
    another rank uses, its SEND and the other rank's RECV are written down at once, the RECV behind the action which
    that rank is busy with at the time::

        rank 0  0F0 0SEND_F0 0F1 0SEND_F1
        rank 1      1RECV_F0 1F0 1RECV_F1 1F1

    So all orders are parts of one common sequence in which every transfer follows whatever it needs, and nothing can
    deadlock, even where a send blocks until it is received. A rank also receives the messages of another in the order
    they are sent, so no tags are needed.

    Raises:
        ScheduleError: if the schedule deadlocks whatever the communication.
    """
    if schedule.lowered:
        return schedule
    schedule.require_small("lowered")
    orders: list[list[Action]] = [[] for _ in schedule.orders]
    # A transfer at the end of an action goes before the actions that start at that same time and may use it.
    events: list[tuple[float, int, int, Action]] = []
    for rank, spans in enumerate(simulate(schedule).spans):
        for action, start, end in spans:
            events.append((end, 0, rank, action))
            events.append((start, 1, rank, action))
    for _, starts, rank, action in sorted(events, key=lambda event: event[:3]):
        if starts:
            orders[rank].append(action)
        elif message := message_of(action, schedule):
            orders[rank].append(message.send)
            orders[schedule.peer(message.send)].append(message.receive)
    return replace(schedule, orders=tuple(map(tuple, orders)), lowered=True)


def fuse(schedule: Schedule) -> Schedule:
    """Turn each I that its own W follows at once into a B::

        1F0 1I0 1W0 1F1 1I1 1F2 1W1  ->  1F0 1B0 1F1 1I1 1F2 1W1

    Nothing is put between such halves, and a backward in one goes takes less time than in two; the rank before gets
    its gradient later by the time of W.
    """
    schedule.require_small("fused")
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
