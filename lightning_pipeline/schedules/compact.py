"""Schedules of millions of actions as arrays: built, checked and simulated for all ranks at once with numpy.

A row for each rank holds its actions as numbers, ``kind * v + n`` for the n-th of its v virtual stages; micro-batches
ascend in each number, so that they need not be written down. A byte for each action replaces an object of some hundred,
and a simulation advances all ranks that can by one action at a time: it takes as many turns as the longest chain of
actions that wait for each other, about ``2 * (num_ranks + num_microbatches)`` under 1F1B.

Imported only for large schedules, so that everything else does without numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lightning_pipeline.schedules.schedule import Action, Kind, LargeOrders, Schedule, loop_placement
from lightning_pipeline.schedules.simulation import Simulation, Span
from lightning_pipeline.schedules.validation import ScheduleError

Numbers = NDArray[np.uint8]
_KINDS = ((Kind.F,), (Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W))


class CompactOrders(LargeOrders):
    """Orders that make their actions when asked for them.

    Args:
        rows: for each rank its actions as numbers, of shape ``[num_ranks, length]``.
        kinds: what the numbers stand for: F, then B, or I and W.
        num_virtual_stages: of each rank, placed in a loop.
    """

    def __init__(self, rows: Numbers, kinds: tuple[Kind, ...], num_virtual_stages: int) -> None:
        self.rows, self.kinds, self.num_virtual_stages = rows, kinds, num_virtual_stages
        self.has_backward = len(kinds) > 1

    @property
    def num_numbers(self) -> int:
        """Numbers that stand for an action."""
        return len(self.kinds) * self.num_virtual_stages

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[r] for r in range(*rank.indices(len(self)))]
        return CompactOrder(self, range(len(self))[rank])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompactOrders):
            return NotImplemented
        return self.kinds == other.kinds and np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return hash((self.kinds, self.rows.shape))


class CompactOrder(Sequence[Action]):
    """One rank's actions, made one at a time."""

    def __init__(self, orders: CompactOrders, rank: int) -> None:
        self._orders, self._rank = orders, rank
        self._row = orders.rows[rank]

    def __len__(self) -> int:
        return len(self._row)

    def _action(self, number: int, microbatch: int) -> Action:
        kind, local = divmod(number, self._orders.num_virtual_stages)
        return Action(self._orders.kinds[kind], local * len(self._orders) + self._rank, microbatch)

    def __iter__(self) -> Iterator[Action]:
        done = [0] * self._orders.num_numbers
        for number in self._row.tolist():
            yield self._action(number, done[number])
            done[number] += 1

    @overload
    def __getitem__(self, place: int) -> Action: ...
    @overload
    def __getitem__(self, place: slice) -> list[Action]: ...
    def __getitem__(self, place: int | slice) -> Action | list[Action]:
        if isinstance(place, slice):
            return [self[p] for p in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        number = int(self._row[place])
        return self._action(number, int(np.count_nonzero(self._row[:place] == number)))


def arrays_of(schedule: Schedule) -> Schedule | None:
    """The same schedule as arrays; None where it is none that arrays can be: not looped, or of mixed backwards."""
    if isinstance(schedule.orders, CompactOrders):
        return schedule
    num_ranks, num_stages = schedule.num_ranks, schedule.num_stages
    virtual = num_stages // num_ranks
    if schedule.placement != loop_placement(num_ranks, virtual) or len(set(map(len, schedule.orders))) != 1:
        return None
    present = {action.kind for order in schedule.orders for action in order}
    kinds = next((kinds for kinds in _KINDS if present == set(kinds)), None)
    if kinds is None or len(kinds) * virtual > np.iinfo(np.uint8).max:
        return None
    rows = np.empty((num_ranks, len(schedule.orders[0])), np.uint8)
    for rank, order in enumerate(schedule.orders):
        done = [0] * (len(kinds) * virtual)
        for place, action in enumerate(order):
            local, home = divmod(action.stage, num_ranks)
            number = kinds.index(action.kind) * virtual + local
            if home != rank or local >= virtual or action.microbatch != done[number]:
                return None
            done[number] += 1
            rows[rank, place] = number
    return replace(schedule, orders=CompactOrders(rows, kinds, virtual))


# -- builders ---------------------------------------------------------------------------------------------------------


def looped(
    num_ranks: int, groups: Sequence[int], num_virtual_stages: int, warm_up_of: Callable[[int], int]
) -> CompactOrders:
    """What ``builders._looped`` makes.

    Args:
        groups: micro-batches of each group.
        warm_up_of: forwards of a rank before it alternates with backwards, by the number of ranks behind it.
    """
    local = np.arange(num_virtual_stages, dtype=np.uint8)
    forwards = np.concatenate([np.repeat(local, group) for group in groups])
    backwards = num_virtual_stages + np.concatenate([np.repeat(local[::-1], group) for group in groups])
    rows = np.empty((num_ranks, 2 * len(forwards)), np.uint8)
    for rank, row in enumerate(rows):
        warm_up = min(warm_up_of(num_ranks - rank - 1), len(forwards))
        steady = len(row) - warm_up
        row[:warm_up] = forwards[:warm_up]
        row[warm_up:steady:2] = forwards[warm_up:]
        row[warm_up + 1 : steady : 2] = backwards[: len(forwards) - warm_up]
        row[steady:] = backwards[len(forwards) - warm_up :]
    return CompactOrders(rows, (Kind.F, Kind.B), num_virtual_stages)


def split_backwards(orders: CompactOrders, behind_of: Callable[[int], int]) -> CompactOrders:
    """What ``builders._split_backwards`` makes of each rank's order; `behind_of` is given the rank."""
    virtual = orders.num_virtual_stages
    num_ranks, length = orders.rows.shape
    rows = np.empty((num_ranks, length // 2 * 3), np.uint8)
    for rank, (row, order) in enumerate(zip(rows, orders.rows, strict=True)):
        is_backward = order >= virtual
        followed = is_backward & (np.cumsum(is_backward) > behind_of(rank))
        places = np.arange(length) + np.cumsum(followed) - followed
        weights = order[is_backward] + virtual
        inside = np.count_nonzero(followed)
        row[places] = order
        row[places[followed] + 1] = weights[:inside]
        row[length + inside :] = weights[inside:]
    return CompactOrders(rows, (Kind.F, Kind.I, Kind.W), virtual)


# -- proof and simulation ---------------------------------------------------------------------------------------------


def check(schedule: Schedule) -> None:
    """What :func:`checking.check` proves, for all ranks at once.

    Micro-batches ascend in each number as it is written. So nothing is missing or done twice if each number is there as
    often as there are micro-batches, and a rank's own order is right if each F comes before its B or I, and that before
    its W. Sends and receives are put where :func:`lower` puts them, in the order of a simulation; one that comes to its
    end is the common sequence in which no rank waits for ever, even where a send blocks until it is received.
    """
    orders = _orders_of(schedule)
    virtual, num_microbatches = orders.num_virtual_stages, schedule.num_microbatches
    for rank, row in enumerate(orders.rows):
        places = [np.flatnonzero(row == number) for number in range(orders.num_numbers)]
        for number, found in enumerate(places):
            kind, local = orders.kinds[number // virtual], number % virtual
            stage = local * len(orders) + rank
            if len(found) != num_microbatches:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: rank {rank} has {len(found)} {kind} of stage {stage}, but a step has "
                    f"{num_microbatches} micro-batches"
                )
            if number >= virtual and (late := np.flatnonzero(places[number - virtual] > found)).size:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: rank {rank} runs {stage}{kind}{late[0]} before "
                    f"{stage}{orders.kinds[number // virtual - 1]}{late[0]}, which it needs"
                )
        if sum(map(len, places)) != len(row):
            raise ScheduleError(f"schedule {schedule.name!r}: rank {rank} has numbers of no action")
    one = [1.0] * schedule.num_stages
    _starts(schedule, dict.fromkeys(orders.kinds, one), [0.0] * schedule.num_stages)


def simulate(schedule: Schedule, costs: dict[Kind, list[float]], transfer: Sequence[float]) -> Simulation:
    """What :func:`simulation.simulate` gives, with spans that are made when asked for.

    Args:
        costs: for each kind, the time on each virtual stage.
        transfer: for each virtual stage, the time over the boundary after it.
    """
    orders = _orders_of(schedule)
    starts = _starts(schedule, costs, transfer)
    durations = [costs[kind] for kind in orders.kinds]
    makespan = float((starts.max(axis=2) + durations).max())  # a stage's micro-batches ascend
    busy = schedule.num_microbatches * sum(map(sum, durations))
    bubble = 1 - busy / (makespan * len(orders)) if makespan else 0.0
    return Simulation(
        makespan, bubble, list(map(_peak_live(orders), orders.rows)), CompactSpans(orders, starts, durations)
    )


def _peak_live(orders: CompactOrders) -> Callable[[Numbers], int]:
    """For a rank's row, the most activations that it holds; see ``simulation.peak_bytes``."""
    if not orders.has_backward:
        return lambda row: min(1, len(row))
    change = np.zeros(orders.num_numbers, np.int32)
    change[: orders.num_virtual_stages] = 1
    change[-orders.num_virtual_stages :] = -1
    return lambda row: int(np.cumsum(change[row]).max())


class CompactSpans(Sequence[list[Span]]):
    """For each rank its actions with their times, made when asked for."""

    def __init__(
        self, orders: CompactOrders, starts: NDArray[np.float64], durations: Sequence[Sequence[float]]
    ) -> None:
        self._orders, self._starts, self._durations = orders, starts, durations

    def __len__(self) -> int:
        return len(self._orders)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[r] for r in range(*rank.indices(len(self)))]
        spans = []
        for action in self._orders[rank]:
            kind = self._orders.kinds.index(action.kind)
            start = float(self._starts[kind, action.stage, action.microbatch])
            spans.append(Span(action, start, start + self._durations[kind][action.stage]))
        return spans


def _orders_of(schedule: Schedule) -> CompactOrders:
    assert isinstance(schedule.orders, CompactOrders)
    return schedule.orders


def _starts(schedule: Schedule, costs: dict[Kind, list[float]], transfer: Sequence[float]) -> NDArray[np.float64]:
    """When each action starts, of shape ``[kinds, num_stages, num_microbatches]``; arguments as for `simulate`."""
    orders = _orders_of(schedule)
    num_ranks, length = orders.rows.shape
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    # A cell is ``kind * num_stages + stage``, which is also ``number * num_ranks + rank``.
    num_cells = len(orders.kinds) * num_stages
    durations = np.concatenate([*(np.asarray(costs[kind], float) for kind in orders.kinds), [0.0]])
    crossing = np.asarray(transfer, float) * (num_ranks > 1)
    # What the rank itself has to have done, F before I before W, and what another stage has to. The cell behind the
    # last is always done, at the beginning.
    own, sources = np.full((2, num_cells), num_cells)
    delays = np.zeros(num_cells)
    own[num_stages:] = np.arange(num_cells - num_stages)
    sources[1:num_stages], delays[1:num_stages] = np.arange(num_stages - 1), crossing[:-1]
    if orders.has_backward:
        backward = slice(num_stages, 2 * num_stages - 1)
        sources[backward], delays[backward] = np.arange(num_stages + 1, 2 * num_stages), crossing[:-1]
    starts = np.zeros((num_cells + 1, num_microbatches))
    done = np.zeros(num_cells + 1, np.int64)
    done[-1] = num_microbatches
    places, free = np.arange(num_ranks) * length, np.zeros(num_ranks)
    last = places + length
    numbers, times = orders.rows.ravel(), starts.ravel()
    ranks = np.arange(num_ranks)
    while ranks.size:
        cells = numbers[places[ranks]].astype(np.int64) * num_ranks + ranks
        microbatches = done[cells]
        waits_for = sources[cells]
        able = (done[waits_for] > microbatches) & (done[own[cells]] > microbatches)
        now = ranks
        if not able.all():
            now, cells, microbatches, waits_for = ranks[able], cells[able], microbatches[able], waits_for[able]
            if not now.size:
                raise _deadlock(schedule, orders, ranks, places)
        made = times[waits_for * num_microbatches + microbatches] + durations[waits_for]
        start = np.maximum(free[now], made + delays[cells])
        times[cells * num_microbatches + microbatches] = start
        free[now] = start + durations[cells]
        done[cells] += 1
        places[now] += 1
        if (places[now] == last[now]).any():
            ranks = ranks[places[ranks] < last[ranks]]
    return starts[:-1].reshape(len(orders.kinds), num_stages, num_microbatches)


def _deadlock(schedule: Schedule, orders: CompactOrders, ranks: NDArray[np.int64], places: Any) -> ScheduleError:
    length = orders.rows.shape[1]
    waits = [f"rank {rank} waits in {orders[rank][places[rank] - rank * length]}" for rank in ranks[:4].tolist()]
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return ScheduleError(f"schedule {schedule.name!r}: deadlock, {'; '.join(waits)}{more}")
