"""Proves that a schedule is complete, in dependency order and free of deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from lightning_pipeline.schedules.lowering import lower
from lightning_pipeline.schedules.schedule import Action, Kind, Schedule
from lightning_pipeline.schedules.simulation import Message, as_arrays, message_of, needs, source_of, yields
from lightning_pipeline.schedules.validation import ScheduleError


def check(schedule: Schedule) -> None:
    """Prove that the schedule can run, and gives the same gradients as any other.

    Every stage runs every micro-batch's F exactly once on its own rank, and in training B, or I and W; nothing runs
    before what it needs; weight gradients add up in ascending order of micro-batches; and no rank waits for ever, even
    where a send blocks until it is received. A schedule without sends and receives is lowered for the last proof.

    Raises:
        ScheduleError: with what is wrong in a sentence, and the grid with the faulty cells marked ``>1B2<``.
    """
    if (arrays := as_arrays(schedule)) is not None:
        from lightning_pipeline.schedules import compact

        try:
            compact.check(arrays)
            return
        except ScheduleError:
            if schedule.is_large:
                raise
            # What is wrong is shown in the grid, below.
    compute = schedule.compute()
    _check_places(compute)
    _check_complete(compute)
    _check_own_order(compute)
    # What is left to go wrong are ranks that wait for each other: lowering refuses those, the rendezvous finds others.
    lowered = lower(schedule)
    messages = [
        (action, message) for _, _, action in _cells(lowered.compute()) if (message := message_of(action, lowered))
    ]
    _check_messages(lowered, messages)
    _check_rendezvous(lowered, [message for _, message in messages])


def _check_places(schedule: Schedule) -> None:
    """Every action belongs where it is, and none does again what was done."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    done_by: dict[Action, Action] = {}
    for rank, position, action in _cells(schedule):
        repeated = [done_by[value] for value in yields(action) if value in done_by]
        fault = None
        if not action.kind.is_compute:
            fault = f"{action} is communication in a schedule that is not lowered"
        elif action.stage >= stages:
            fault = f"{action} is of stage {action.stage}, but the last stage is {stages - 1}"
        elif action.microbatch >= microbatches:
            fault = f"{action} is of micro-batch {action.microbatch}, but the last micro-batch is {microbatches - 1}"
        elif (home := schedule.placement[action.stage]) != rank:
            fault = f"{action} is on rank {rank}, but stage {action.stage} is on rank {home}"
        elif repeated:
            fault = f"{action} runs twice" if action in repeated else f"{action} repeats a part of {repeated[0]}"
        if fault:
            raise schedule.error(fault, {(rank, position)})
        done_by.update(dict.fromkeys(yields(action), action))


def _check_complete(schedule: Schedule) -> None:
    """Every stage runs forward, and in training backward, for every micro-batch."""
    done = {value for order in schedule.orders for action in order for value in yields(action)}
    has_backward = schedule.has_backward
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.num_microbatches)):
        f, i, w = (Action(kind, stage, microbatch) for kind in (Kind.F, Kind.I, Kind.W))
        missing = [value for value in ((f, i, w) if has_backward else (f,)) if value not in done]
        if missing:
            whole = missing[-2:] == [i, w] and f not in missing
            action = Action(Kind.B, stage, microbatch) if whole else missing[0]
            raise _missing(schedule, action)


def _check_own_order(schedule: Schedule) -> None:
    """What an action needs from its own rank comes first, and the weight gradients of a stage ascend."""
    done: set[Action] = set()
    last: dict[int, int] = {}
    for rank, position, action in _cells(schedule):
        for value in needs(action, schedule.num_stages):
            if schedule.placement[value.stage] == rank and value not in done:
                source = source_of(value, schedule)
                raise schedule.error(f"{action} runs before {source}, which it needs", {(rank, position)})
        done.update(yields(action))
        if action.kind in (Kind.B, Kind.W):
            if action.microbatch < last.get(action.stage, 0):
                raise schedule.error(
                    f"{action} adds to the gradients of stage {action.stage} after micro-batch {last[action.stage]}; "
                    f"micro-batches must ascend there, or results would depend on the schedule",
                    {(rank, position)},
                )
            last[action.stage] = action.microbatch


def _check_messages(schedule: Schedule, messages: list[tuple[Action, Message]]) -> None:
    """Each transfer's send and receive are there once, after what is sent and before what uses it."""
    expected = {end for _, message in messages for end in message}
    at: dict[Action, tuple[int, int]] = {}
    for rank, position, action in _cells(schedule):
        fault = None
        if not action.kind.is_compute and action not in expected:
            fault = f"{action} belongs to no transfer between two ranks"
        elif (home := schedule.placement[action.stage]) != rank:
            fault = f"{action} is on rank {rank}, but stage {action.stage} is on rank {home}"
        elif action in at:
            fault = f"{action} is done twice"
        if fault:
            raise schedule.error(fault, {(rank, position)})
        at[action] = rank, position

    for source, message in messages:
        for end in message:
            if end not in at:
                raise _missing(schedule, end)
        if at[message.send] < at[source]:
            raise schedule.error(f"{message.send} comes before {source}, whose value it sends", {at[message.send]})
        uses = (Kind.F,) if message.receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
        for user in (Action(kind, message.receive.stage, message.receive.microbatch) for kind in uses):
            if user in at and at[user] < at[message.receive]:
                raise schedule.error(f"{user} runs before {message.receive}, which it needs", {at[user]})


def _check_rendezvous(schedule: Schedule, messages: list[Message]) -> None:
    """No rank waits for ever where a send and its receive both wait for the other."""
    receive_of = dict(messages)
    ends = [
        [(position, action) for position, action in enumerate(order) if not action.kind.is_compute]
        for order in schedule.orders
    ]
    heads = [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, todo in enumerate(ends):
            while heads[rank] < len(todo) and (receive := receive_of.get(todo[heads[rank]][1])):
                peer = schedule.peer(todo[heads[rank]][1])
                if heads[peer] == len(ends[peer]) or ends[peer][heads[peer]][1] != receive:
                    break
                heads[rank] += 1
                heads[peer] += 1
                progress = True
    stuck = [(rank, *todo[heads[rank]]) for rank, todo in enumerate(ends) if heads[rank] < len(todo)]
    if stuck:
        waits = "; ".join(f"rank {rank} waits in {action}" for rank, _, action in stuck)
        raise schedule.error(f"deadlock where sends block, {waits}", {(rank, position) for rank, position, _ in stuck})


def _missing(schedule: Schedule, action: Action) -> ScheduleError:
    """The error for a missing action, shown at the end of the rank that lacks it."""
    rank = schedule.placement[action.stage]
    orders = [(*order, action) if r == rank else order for r, order in enumerate(schedule.orders)]
    shown = replace(schedule, orders=tuple(orders))
    return shown.error(
        f"rank {rank} lacks {action} (shown behind its last action)", {(rank, len(schedule.orders[rank]))}
    )


def _cells(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            yield rank, position, action
