"""What an action needs, what it yields, and what has to travel between ranks.

A value has the name of the action that yields it: F the outputs of a stage, I the gradients of its inputs (whether I or
B computes them), W the gradients of its weights.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipeline.schedules.action import Action, Kind
from lightning_pipeline.schedules.schedule import Schedule


class Message(NamedTuple):
    """The two ends of one transfer: the sender's action and the receiver's."""

    send: Action
    receive: Action


def yields(action: Action) -> tuple[Action, ...]:
    """The values a compute action yields: two for B, one for any other."""
    if action.kind is Kind.B:
        return Action(Kind.I, action.stage, action.microbatch), Action(Kind.W, action.stage, action.microbatch)
    return (action,)


def source_of(value: Action, schedule: Schedule) -> Action:
    """The action that yields a value in this schedule, for messages: ``1B0`` rather than ``1I0`` where B does both."""
    whole = Action(Kind.B, value.stage, value.microbatch)
    return whole if value in yields(whole) and any(whole in order for order in schedule.orders) else value


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The values that must exist before a compute action can run."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        return (Action(Kind.F, stage - 1, microbatch),) if stage > 0 else ()
    if action.kind is Kind.W:
        return (Action(Kind.I, stage, microbatch),)
    own = Action(Kind.F, stage, microbatch)
    return (own, Action(Kind.I, stage + 1, microbatch)) if stage < num_stages - 1 else (own,)


def message_of(action: Action, schedule: Schedule) -> Message | None:
    """What must be sent once a compute action is done; None where its value is used on the same rank or nowhere."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        peer, send, receive = stage + 1, Kind.SEND_F, Kind.RECV_F
    elif action.kind in (Kind.B, Kind.I):
        peer, send, receive = stage - 1, Kind.SEND_B, Kind.RECV_B
    else:
        return None
    if not 0 <= peer < schedule.num_stages or schedule.placement[peer] == schedule.placement[stage]:
        return None
    return Message(Action(send, stage, microbatch), Action(receive, peer, microbatch))
