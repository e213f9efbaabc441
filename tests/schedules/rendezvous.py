"""Proves a lowered schedule: it comes to its end even where a send blocks until it is received."""

from __future__ import annotations

from lightning_pipeline.schedules import Action, Kind, Schedule
from lightning_pipeline.schedules.lowering import message_of
from lightning_pipeline.schedules.simulation import needs, yields


def run_with_blocking_sends(schedule: Schedule) -> None:
    """Each rank goes on when it has what its next action needs; a send and its receive only at the same time."""
    messages = [message for order in schedule.compute() for a in order if (message := message_of(a, schedule))]
    receive_of = dict(messages)
    value_of = {
        send: Action(Kind.F if send.kind is Kind.SEND_F else Kind.I, send.stage, send.microbatch) for send in receive_of
    }
    has: list[set[Action]] = [set() for _ in schedule]
    heads = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule.orders):
            while heads[rank] < len(order):
                action = order[heads[rank]]
                if action.kind.is_compute:
                    if not has[rank].issuperset(needs(action, schedule.num_stages)):
                        break
                    has[rank].update(yields(action))
                else:
                    receive, peer = receive_of.get(action), schedule.peer(action)
                    others = schedule.orders[peer]
                    if receive is None or heads[peer] == len(others) or others[heads[peer]] != receive:
                        break
                    assert value_of[action] in has[rank], f"{action} comes before the value it sends"
                    has[peer].add(value_of[action])
                    heads[peer] += 1
                heads[rank] += 1
                progress = True
    stuck = [order[head] for order, head in zip(schedule.orders, heads, strict=True) if head < len(order)]
    assert not stuck, f"ranks wait forever in {stuck}"
    sent = [a for order in schedule.orders for a in order if not a.kind.is_compute]
    assert sorted(map(str, sent)) == sorted(str(end) for message in messages for end in message)
