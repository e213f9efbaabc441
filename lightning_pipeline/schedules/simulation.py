"""When each action of a schedule would run, and what that costs in time and memory.

What an action needs, what it yields, and what has to travel between ranks.

A value has the name of the action that yields it: F the outputs of a stage, I the gradients of its inputs (whether I or
B computes them), W the gradients of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_pipeline.schedules.offloading import HostLink, changes_of
from lightning_pipeline.schedules.schedule import Action, Kind, Schedule, format_grid
from lightning_pipeline.schedules.validation import ScheduleError

SENDS = (Kind.SEND_F, Kind.SEND_B)


class Message(NamedTuple):
    """The two ends of one transfer: the sender's action and the receiver's."""

    send: Action
    receive: Action


def yields(action: Action) -> tuple[Action, ...]:
    """The values a compute action yields: two for B, one for any other."""
    if action.kind is Kind.B:
        return Action(Kind.I, action.stage, action.microbatch), Action(Kind.W, action.stage, action.microbatch)
    return (action,)


def sent_by(send: Action) -> Action:
    """The value that a send carries."""
    return Action(Kind.F if send.kind is Kind.SEND_F else Kind.I, send.stage, send.microbatch)


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


Cost = float | Sequence[float]


class Span(NamedTuple):
    """One action and the time it starts and ends, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule would do with given costs.

    Attributes:
        makespan: from the first start to the last end, in the unit of the costs.
        bubble: the share of all ranks' time that is idle, 0 to 1.
        peak_live: for each rank, how many activations of a virtual stage it holds at most at once; one that is in host
            memory counts as the share that stays.
        spans: for each rank, its compute actions with their times.
        waited_for_host: for each rank, the time that it waits for transfers to host memory and back, which nothing
            hides; empty where nothing goes there.
    """

    makespan: float
    bubble: float
    peak_live: list[float]
    spans: Sequence[list[Span]]
    waited_for_host: Sequence[float] = ()


def simulate(
    schedule: Schedule,
    forward: Cost = 1.0,
    input_grad: Cost = 1.0,
    weight_grad: Cost = 1.0,
    transfer: Cost = 0.0,
    *,
    offload: float = 0.0,
    host_transfer: Cost = 0.0,
) -> Simulation:
    """Run the schedule on paper: each rank starts its next action as soon as it is free and the inputs are there.

    Args:
        schedule: any schedule; sends and receives take no time of a rank.
        forward: time of F, one number or one for each virtual stage.
        input_grad: time of I, likewise. B takes ``input_grad + weight_grad``.
        weight_grad: time of W, likewise.
        transfer: time until a value arrives on another rank, one number or one for each virtual stage but the last, for
            the boundary after it.
        offload: the share of a virtual stage's activations that goes to host memory while they wait
            (``offloading.away_in``); they go and come back beside the computation.
        host_transfer: time that they take to go, and to come back; one number or one for each virtual stage.

    Raises:
        ScheduleError: if the schedule deadlocks, a list of costs has not one number for each virtual stage, or a
            schedule of arrays is to send activations.
    """
    schedule = schedule.compute()
    f, i, w = (
        _per_stage(name, cost, schedule.num_stages)
        for name, cost in (("forward", forward), ("input_grad", input_grad), ("weight_grad", weight_grad))
    )
    costs = {Kind.F: f, Kind.I: i, Kind.W: w, Kind.B: [a + b for a, b in zip(i, w, strict=True)]}
    between = transfer if isinstance(transfer, Sequence) else [transfer] * (schedule.num_stages - 1)
    between = _per_stage("transfer", [*between, 0.0], schedule.num_stages)
    links = []
    if offload:
        schedule.require_small("simulated with activations in host memory")
        to_host = _per_stage("host_transfer", host_transfer, schedule.num_stages)
        links = [HostLink(order, to_host) for order in schedule.orders]
    elif (arrays := as_arrays(schedule)) is not None:
        from lightning_pipeline.schedules import compact

        try:
            return compact.simulate(arrays, costs, between)
        except ScheduleError:
            if schedule.is_large:
                raise
            # The deadlock is shown in the grid, below.
    spans, ready = _spans(schedule, costs, between, links)
    stuck = {rank: len(done) for rank, done in enumerate(spans) if len(done) < len(schedule.orders[rank])}
    if stuck:
        raise _deadlock(schedule, stuck, ready)
    makespan = max((order[-1].end for order in spans if order), default=0.0)
    busy = sum(span.end - span.start for order in spans for span in order)
    bubble = 1 - busy / (makespan * schedule.num_ranks) if makespan else 0.0
    # An activation lives from its F to the end of its B or W; without a backward only while F runs.
    peaks: list[float] = [min(1, len(order)) for order in schedule.orders]
    if schedule.has_backward:
        peaks = peak_bytes(schedule, [1] * schedule.num_stages, sent=[offload] * schedule.num_stages if offload else ())
    return Simulation(makespan, bubble, peaks, spans, [link.waited for link in links])


_LONG = 8192  # passes, from which on arrays are worth it


def as_arrays(schedule: Schedule) -> Schedule | None:
    """A long schedule as arrays (``compact``), which are proved and simulated for all ranks at once.

    None if it is short or lowered, cannot be arrays, or there is no numpy.
    """
    if schedule.lowered or schedule.num_stages * schedule.num_microbatches < _LONG:
        return schedule if schedule.is_large else None
    try:
        from lightning_pipeline.schedules import compact
    except ModuleNotFoundError:
        return None
    return compact.arrays_of(schedule)


def _spans(
    schedule: Schedule, costs: dict[Kind, list[float]], transfer: list[float], links: Sequence[HostLink] = ()
) -> tuple[list[list[Span]], dict[Action, float]]:
    """What each rank does when, up to a deadlock; and when each value is there.

    Args:
        transfer: for each virtual stage, the time that a value takes over the boundary after it.
        links: of each rank, to its host memory; empty where nothing goes there.
    """
    ready: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.orders]

    def arrival(action: Action, rank: int) -> float | None:
        """When the last input is there; None if it is not known yet."""
        latest = 0.0
        for value in needs(action, schedule.num_stages):
            if value not in ready:
                return None
            elsewhere = schedule.placement[value.stage] != rank
            # A forward's value crosses the boundary after its stage, a gradient the one before it.
            boundary = value.stage if value.kind is Kind.F else value.stage - 1
            latest = max(latest, ready[value] + transfer[boundary] * elsewhere)
        return latest

    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule.orders):
            done = spans[rank]
            while len(done) < len(order):
                action = order[len(done)]
                there = arrival(action, rank)
                if there is None:
                    break
                place, free = len(done), done[-1].end if done else 0.0
                start = links[rank].start(place, free, there) if links else max(there, free)
                done.append(Span(action, start, start + costs[action.kind][action.stage]))
                if links:
                    links[rank].note_end(place, done[-1].end)
                ready.update(dict.fromkeys(yields(action), done[-1].end))
                progress = True
    return spans, ready


def _deadlock(schedule: Schedule, stuck: dict[int, int], ready: dict[Action, float]) -> ScheduleError:
    waits = []
    for rank, position in stuck.items():
        action = schedule.orders[rank][position]
        value = next(value for value in needs(action, schedule.num_stages) if value not in ready)
        waits.append(f"rank {rank} waits in {action} for {source_of(value, schedule)}")
    return schedule.error(f"deadlock, {'; '.join(waits)}", set(stuck.items()))


def _per_stage(name: str, cost: Cost, num_stages: int) -> list[float]:
    costs = [float(c) for c in cost] if isinstance(cost, Sequence) else [float(cost)] * num_stages
    if len(costs) != num_stages:
        raise ScheduleError(
            f"{name} has {len(costs)} costs for {num_stages} virtual stages; give one number, or one for each stage"
        )
    if any(c < 0 for c in costs):
        raise ScheduleError(f"{name} must not be negative, got {cost}")
    return costs


def time_slots(schedule: Schedule) -> list[list[Action | None]]:
    """For each rank, what it does in each slot of time, None where it is idle; sends and receives take no time.

    Every action takes one slot. Only where the schedule also splits backwards into I and W does B take two.
    """
    has_split = any(action.kind is Kind.I for order in schedule.orders for action in order)
    half = 1.0 if has_split else 0.5
    schedule.require_small("drawn or written")
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


def peak_bytes(
    schedule: Schedule,
    kept: Sequence[float],
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    sent: Sequence[float] = (),
) -> list[float]:
    """For each rank, the most bytes of activations that its device holds at once.

    Args:
        kept: bytes that each virtual stage keeps of a micro-batch from its F to the end of its B or W.
        forward: the most that it takes of the micro-batch during F, what it keeps included; None: no more than that.
        backward: likewise during B or I.
        sent: bytes of `kept` that go to host memory while a micro-batch waits (``offloading.away_in``).
    """
    during = {Kind.F: forward or kept, Kind.B: backward or kept, Kind.I: backward or kept}
    return [_peak(order, kept, during, sent) for order in schedule.compute().orders]


def live_activations(schedule: Schedule, offload: float = 0) -> list[float]:
    """For each virtual stage, the most micro-batches whose activations it holds at once; `offload` as in `simulate`."""
    orders = schedule.compute().orders
    found = []
    for stage, rank in enumerate(schedule.placement):
        own = [int(other == stage) for other in range(schedule.num_stages)]
        found.append(_peak(orders[rank], own, {}, [offload * one for one in own] if offload else ()))
    return found


def _peak(
    order: Sequence[Action], kept: Sequence[float], during: Mapping[Kind, Sequence[float]], sent: Sequence[float]
) -> float:
    """The most bytes that a rank holds at once; `during` has what kinds of actions take of their own micro-batch."""
    live: float = 0  # stays whole where sizes are
    peak: float = 0
    changes = changes_of(order, sent)
    for place, action in enumerate(order):
        stage = action.stage
        live += changes.get(place, 0)
        others = live - kept[stage] * (action.kind is not Kind.F)
        peak = max(peak, live, others + during.get(action.kind, kept)[stage])
        if action.kind is Kind.F:
            live += kept[stage]
        elif action.kind in (Kind.B, Kind.W):
            live -= kept[stage]
    return max(peak, live)
