"""Why ranks do not compute: each moment of a timeline that is no computation, by its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from lightning_pipeline.schedules.offloading import away_in
from lightning_pipeline.schedules.schedule import Action, Kind
from lightning_pipeline.schedules.simulation import SENDS, needs, sent_by, yields
from lightning_pipeline.schedules.timeline import Timeline, extent


class Cause(str, Enum):
    """Why a rank does not compute. Members compare as their text."""

    PEER = "peer's compute"
    """Another rank has not computed the input yet or, at the end of a step, has not finished."""
    TRANSFER = "transfer"
    """The input is on its way, or the rank sends."""
    REDUCTION = "reduction"
    """Gradients are summed over replicas after the rank's last action."""
    PYTHON = "own Python"
    """The rank has all that it needs, and runs the step's Python or this package's."""


class Wait(NamedTuple):
    """A time without computation on a rank.

    Attributes:
        on: of a wait for a peer or a transfer: the action that it waits for, or for the end of.
        before: the computation that follows; None at the end of the step.
    """

    cause: Cause
    start: float
    end: float
    on: Action | None
    before: Action | None


def waits(
    timeline: Timeline, reductions: Sequence[Sequence[tuple[float, float]]] = (), transfer: float = 0.0
) -> list[list[Wait]]:
    """For each rank of a pipeline, its time without computation from the first start to the last end of any action.

    Until a peer has computed a rank's next input, the rank waits for that, whatever its Python does meanwhile. From
    then until the input has been sent and `transfer` has passed it waits for the transfer, as it does while it sends.
    The rest is its own Python, or after its last action the reduction or the peers that are not done.

    Args:
        transfer: time from the end of a send until the value is there.
    """
    begin, end = extent(timeline)
    made, sent, rank_of = _values(timeline)
    last = max((span for row in timeline for span in row if span[0].kind.is_compute), key=lambda s: s[2], default=None)
    found: list[list[Wait]] = []
    for rank, row in enumerate(timeline):
        beside = [(start, stop, Cause.TRANSFER) for action, start, stop in row if action.kind in SENDS]
        own: list[Wait] = []
        free = begin
        for action, start, stop in sorted((span for span in row if span[0].kind.is_compute), key=lambda span: span[1]):
            if start > free:
                inputs = [v for v in needs(action, len(rank_of)) if v in made and rank_of[v.stage] != rank]
                borders: list[_Border] = [(free, Cause.PYTHON, None)]
                if inputs:
                    value = max(inputs, key=lambda one: made[one][1])
                    by, computed = made[value]
                    there = max(sent.get(value, computed), computed) + transfer
                    borders = [(free, Cause.PEER, by), (computed, Cause.TRANSFER, by), (there, Cause.PYTHON, None)]
                own += _parts(borders, free, start, action, beside)
            free = max(free, stop)
        if end > free:
            beside += [(start, stop, Cause.REDUCTION) for start, stop in (reductions[rank] if reductions else ())]
            own += _parts([(free, Cause.PEER, last[0] if last else None)], free, end, None, beside)
        found.append(own)
    return found


def shares(waits_of_rank: Sequence[Wait], duration: float) -> dict[str, float]:
    """The share of `duration` that each cause takes, 0 to 1."""
    total = dict.fromkeys((cause.value for cause in Cause), 0.0)
    for wait in waits_of_rank:
        total[wait.cause.value] += (wait.end - wait.start) / duration if duration else 0.0
    return total


_Border = tuple[float, Cause, Action | None]


def _parts(
    borders: Sequence[_Border],
    start: float,
    end: float,
    before: Action | None,
    beside: Sequence[tuple[float, float, Cause]],
) -> list[Wait]:
    """The time from `start` to `end`, cut where the cause changes.

    Args:
        borders: from when on there is which cause, in order.
        beside: spans with a cause of their own, which counts unless the rank waits for its next input anyway.
    """
    times = [time for time, _, _ in borders] + [time for first, last, _ in beside for time in (first, last)]
    cuts = sorted({start, end, *(time for time in times if start < time < end)})
    found: list[Wait] = []
    for left, right in pairwise(cuts):
        _, cause, on = [border for border in borders if border[0] <= left][-1]
        if cause is Cause.PYTHON or (cause is Cause.PEER and before is None):
            others = [other for first, last, other in beside if first <= left < last]
            cause, on = (others[0], None) if others else (cause, on)
        if found and found[-1].cause is cause and found[-1].on == on:
            found[-1] = found[-1]._replace(end=right)
        else:
            found.append(Wait(cause, left, right, on, before))
    return found


def _values(timeline: Timeline) -> tuple[dict[Action, tuple[Action, float]], dict[Action, float], Mapping[int, int]]:
    """What was computed, by which action until when; when it had been sent; and the rank of each virtual stage."""
    made: dict[Action, tuple[Action, float]] = {}
    sent: dict[Action, float] = {}
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(timeline):
        for action, _, end in row:
            rank_of[action.stage] = rank
            if action.kind in SENDS:
                sent[sent_by(action)] = end
            elif action.kind.is_compute:
                made[yields(action)[0]] = action, end
    return made, sent, rank_of


def live_over_time(
    timeline: Timeline, kept: Mapping[int, float] | None = None, offload: float = 0
) -> list[list[tuple[float, float, float]]]:
    """For each rank, from when on its device holds how many activations of virtual stages, and how many bytes.

    An activation lives from the start of its F to the end of its B or W; without a backward only while F runs.

    Args:
        kept: bytes that a virtual stage keeps of a micro-batch; without them all bytes are 0.
        offload: the share of activations that goes to host memory while they wait (`simulate`).
    """
    has_backward = any(action.kind in (Kind.B, Kind.W) for row in timeline for action, _, _ in row)
    found: list[list[tuple[float, float, float]]] = []
    for row in timeline:
        changes: list[tuple[float, float, float]] = []
        computed = sorted((span for span in row if span[0].kind.is_compute), key=lambda span: span[1])
        for one in away_in([action for action, _, _ in computed]) if offload else ():
            size = offload * kept.get(one.stage, 0.0) if kept else 0.0
            changes += [(computed[one.gone][1], -offload, -size), (computed[one.back][1], offload, size)]
        for action, start, end in row:
            size = kept.get(action.stage, 0.0) if kept else 0.0
            if action.kind is Kind.F:
                changes.append((start, 1, size))
            if action.kind in ((Kind.B, Kind.W) if has_backward else (Kind.F,)):
                changes.append((end, -1, -size))
        count: float = 0
        size, line = 0.0, []
        for time, change, more in sorted(changes):
            count, size = count + change, size + more
            line.append((time, count, size))
        found.append(line)
    return found
