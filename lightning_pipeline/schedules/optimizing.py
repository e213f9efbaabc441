"""``schedule="optimized"``: an order made for the costs of every stage, under a bound on memory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_pipeline.schedules.builders import SCHEDULE_NAMES, build
from lightning_pipeline.schedules.lowering import fuse
from lightning_pipeline.schedules.order_search import RULES, Bound, Orders, OrderSearch
from lightning_pipeline.schedules.recorded_costs import Costs
from lightning_pipeline.schedules.schedule import Action, Kind, Schedule
from lightning_pipeline.schedules.simulation import peak_bytes
from lightning_pipeline.schedules.validation import ScheduleError

OPTIMIZED = "optimized"
_EFFORT = 4_000_000  # actions that are simulated in a search, in all: a few seconds
_FEWEST_TRIES, _MOST_TRIES = 20, 4_000  # from each start
_STARTS = 3  # orders that are improved, of those with whole backwards and of those with split ones


@dataclass(frozen=True)
class Optimized:
    """What a search found.

    Attributes:
        named: what each named schedule takes that keeps the bound, on the same stages.
    """

    schedule: Schedule
    makespan: float
    named: dict[str, float]


def optimize(
    costs: Costs,
    placement: Sequence[int],
    num_microbatches: int,
    *,
    max_live_microbatches: float | None = None,
    kept_bytes: Sequence[float] | None = None,
    max_bytes: float | None = None,
) -> Optimized:
    """Search for the order that takes the least time in simulation.

    It starts from the named schedules of this placement that keep the bound, so its result is never slower than the
    best of them, and from list scheduling by several rules (``order_search.Rule``). The best of these are improved by
    simulated annealing for a fixed number of tries, so that the same arguments give the same result.

    Args:
        max_live_microbatches: the most that a rank may hold; each of its v virtual stages holds a v-th of one.
        kept_bytes: bytes that each virtual stage keeps of a micro-batch from its F to the end of its B or W.
        max_bytes: the most of those that a rank may hold.

    Raises:
        ScheduleError: `max_bytes` without `kept_bytes`, or no order keeps the bound.
    """
    if max_bytes is not None and kept_bytes is None:
        raise ScheduleError(f"max_bytes={max_bytes:g} needs kept_bytes, what each virtual stage keeps of a micro-batch")
    bounds: list[Bound] = []
    if max_live_microbatches is not None:
        shares = [1 / placement.count(rank) for rank in placement]
        _require_room("max_live_microbatches", max_live_microbatches, placement, shares)
        bounds.append((shares, max_live_microbatches * (1 + 1e-9)))
    if max_bytes is not None and kept_bytes is not None:
        _require_room("max_bytes", max_bytes, placement, kept_bytes)
        bounds.append((kept_bytes, max_bytes))
    named = [
        schedule
        for schedule in _named_on(placement, num_microbatches)
        if all(max(peak_bytes(schedule, sizes)) <= most for sizes, most in bounds)
    ]
    found = list(named)
    for splits in (False, True):
        search = OrderSearch(
            placement,
            num_microbatches,
            forward=costs.forward,
            backward=costs.input_grad if splits else costs.backward,
            weight_grad=costs.weight_grad if splits else (),
            transfer=costs.transfers or [costs.transfer] * (len(placement) - 1),
            bounds=bounds,
        )
        starts = [orders for rule in RULES if (orders := search.listed(rule)) is not None]
        starts += [
            orders
            for schedule in (one_at_a_time(placement, num_microbatches), *named)
            if (orders := _as_numbers(schedule, splits=splits))
        ]
        found += [_as_schedule(orders, search) for orders in _improved(search, starts)]
    timed = [(_time(schedule, costs), schedule) for schedule in found]
    (makespan, best), _ = min(timed, key=lambda pair: pair[0][0])
    return Optimized(replace(best, name=OPTIMIZED), makespan, {s.name: time for (time, _), s in timed[: len(named)]})


def one_at_a_time(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """The order that holds the least: each micro-batch's backward before the next one's forward."""
    rows: list[tuple[Action, ...]] = []
    for rank in range(max(placement) + 1):
        own = [stage for stage, place in enumerate(placement) if place == rank]
        turn = [(Kind.F, stage) for stage in own] + [(Kind.B, stage) for stage in reversed(own)]
        rows.append(tuple(Action(*each, index) for index in range(num_microbatches) for each in turn))
    return Schedule("one_at_a_time", tuple(rows), num_microbatches, tuple(placement))


def held_of_one(placement: Sequence[int], sizes: Sequence[float]) -> list[float]:
    """For each rank, what it holds of one micro-batch at its first backward: no order holds less.

    Args:
        sizes: what each virtual stage keeps of a micro-batch.
    """
    held = [0.0] * (max(placement) + 1)
    for rank, size in zip(placement, sizes, strict=True):
        held[rank] += size
    return held


def _require_room(bound: str, most: float, placement: Sequence[int], sizes: Sequence[float]) -> None:
    held = held_of_one(placement, sizes)
    least = max(held)
    if least > most * (1 + 1e-9):
        raise ScheduleError(
            f"no order keeps {bound}={most:.15g}: {least:.15g} is the least, what rank {held.index(least)} holds of "
            f"one micro-batch at its first backward; raise it, or use more stages or smaller micro-batches"
        )


def _time(schedule: Schedule, costs: Costs) -> tuple[float, Schedule]:
    """The faster of halves that follow one another fused, and not: fused, the rank before gets its gradient later."""
    return min(((costs.simulate(s).makespan, s) for s in (fuse(schedule), schedule)), key=lambda pair: pair[0])


def _named_on(placement: Sequence[int], num_microbatches: int) -> Iterator[Schedule]:
    num_ranks = max(placement) + 1
    for name in SCHEDULE_NAMES:
        try:
            schedule = build(name, num_ranks, num_microbatches, len(placement) // num_ranks)
        except ScheduleError:
            continue
        if schedule.has_backward and schedule.placement == tuple(placement):
            yield schedule


def _improved(search: OrderSearch, starts: Sequence[Orders]) -> Iterator[Orders]:
    """The best of the starts, improved."""
    timed = {tuple(map(tuple, orders)): found for orders in starts if (found := search.timed(orders)) is not None}
    chosen = sorted(timed, key=lambda orders: timed[orders].makespan)[:_STARTS]
    tries = min(max(_EFFORT // (2 * _STARTS * search.num_actions), _FEWEST_TRIES), _MOST_TRIES)
    for orders in chosen:
        yield search.improved(list(map(list, orders)), tries, random.Random(0))[1]


_KINDS = {False: (Kind.F, Kind.B), True: (Kind.F, Kind.I, Kind.W)}


def _as_numbers(schedule: Schedule, *, splits: bool) -> Orders | None:
    """The schedule's orders as numbers, its whole backwards split where asked; None if it has split ones and not."""
    kinds = _KINDS[splits]
    orders: Orders = []
    for order in schedule:
        numbers: list[int] = []
        for action in order:
            halves = (Kind.I, Kind.W) if splits and action.kind is Kind.B else (action.kind,)
            if any(half not in kinds for half in halves):
                return None
            numbers += [kinds.index(half) * schedule.num_stages + action.stage for half in halves]
        orders.append(numbers)
    return orders


def _as_schedule(orders: Orders, search: OrderSearch) -> Schedule:
    kinds = _KINDS[search.last_kind == 2]
    rows = []
    for order in orders:
        done = [0] * len(search.durations)
        row = []
        for number in order:
            kind, stage = divmod(number, search.num_stages)
            row.append(Action(kinds[kind], stage, done[number]))
            done[number] += 1
        rows.append(tuple(row))
    return Schedule(OPTIMIZED, tuple(rows), search.num_microbatches, tuple(search.placement))
