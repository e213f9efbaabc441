"""Orders as numbers: a search that simulates thousands of them for given costs (see ``optimizing``).

An order is a list of numbers ``kind * num_stages + stage``, with micro-batches ascending in each number, so that the
n-th occurrence is micro-batch n. Moving one in its list is all that there is to try.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

Order = list[int]
Orders = list[Order]
"""One for each rank."""

Bound = tuple[Sequence[float], float]
"""What each virtual stage adds while it holds a micro-batch, and the most that the sum on a rank may be."""

MAX_SHIFT = 8  # places that an action is moved by at most
_HEAT = 0.01  # of the makespan: how much worse an order may be that the search goes on from at first


class Timed(NamedTuple):
    """What a simulation of orders tells.

    Attributes:
        places: for each number the places of its micro-batches in its rank's order.
    """

    makespan: float
    ends: list[list[float]]
    places: list[list[int]]


class Rule(NamedTuple):
    """How list scheduling chooses among the actions that are ready.

    Attributes:
        forward_first: a forward before a backward; else after it.
        deep_first: the latest stage before earlier ones; else the first micro-batch.
        patience: a rank waits for an input that arrives within this share of W's time, rather than do W meanwhile.
        hop: a rank holds at most one micro-batch and this many for each rank behind it.
    """

    forward_first: bool
    deep_first: bool
    patience: float
    hop: float


RULES = [Rule(*rule) for rule in product((False, True), (False, True), (0.0, 0.5, 1.0), (1.0, 2.0, 1e9))]


class OrderSearch:
    """Times, list scheduling and improvement of orders for given costs.

    Args:
        forward: time of F of each virtual stage.
        backward: likewise of I, or of B where there is no `weight_grad`.
        weight_grad: likewise of W; empty where backwards are whole.
        transfer: time until a value is on another rank, for each boundary.
        bounds: on memory; all are kept.
    """

    def __init__(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        *,
        forward: Sequence[float],
        backward: Sequence[float],
        weight_grad: Sequence[float],
        transfer: Sequence[float],
        bounds: Sequence[Bound],
    ) -> None:
        self.num_stages = num_stages = len(placement)
        self.num_ranks = max(placement) + 1
        self.num_microbatches = num_microbatches
        self.last_kind = 2 if weight_grad else 1  # which gives activations back
        self.placement = placement
        self.durations = [*forward, *backward, *weight_grad]
        self.num_actions = len(self.durations) * num_microbatches
        self.bounds = bounds
        # For each number, the one on another stage that it waits for (-1: none), the time from there, and who waits.
        self.source = [-1] * len(self.durations)
        self.delay = [0.0] * len(self.durations)
        self.user = [-1] * len(self.durations)
        for first in range(num_stages - 1):
            crossing = transfer[first] * (placement[first] != placement[first + 1])
            for source, user in ((first, first + 1), (num_stages + first + 1, num_stages + first)):
                self.source[user], self.user[source], self.delay[user] = source, user, crossing
        self.stages_on = [[s for s in range(num_stages) if placement[s] == rank] for rank in range(self.num_ranks)]
        self.own = [[op for op in range(len(self.durations)) if self.rank_of(op) == r] for r in range(self.num_ranks)]

    def rank_of(self, op: int) -> int:
        """The rank that does it."""
        return self.placement[op % self.num_stages]

    def fits(self, order: Order) -> bool:
        """Whether a rank's order keeps the bounds, and its halves follow one another."""
        num_stages, last_kind = self.num_stages, self.last_kind
        ahead = [0] * len(self.durations)  # how many more of the kind before are done
        live = [0.0] * len(self.bounds)
        for op in order:
            kind, stage = divmod(op, num_stages)
            if kind:
                ahead[op] -= 1
                if ahead[op] < 0:
                    return False
            if kind < last_kind:
                ahead[op + num_stages] += 1
            if kind in (0, last_kind):
                for index, (sizes, most) in enumerate(self.bounds):
                    live[index] += -sizes[stage] if kind else sizes[stage]
                    if live[index] > most:
                        return False
        return True

    def timed(self, orders: Orders) -> Timed | None:
        """Simulate orders that fit; None if ranks wait for each other for ever."""
        done: list[list[float]] = [[] for _ in self.durations]
        places: list[list[int]] = [[] for _ in self.durations]
        ends: list[list[float]] = [[] for _ in orders]
        source_of, delay_of, durations = self.source, self.delay, self.durations
        progress = True
        while progress:
            progress = False
            for rank, order in enumerate(orders):
                own = ends[rank]
                now = own[-1] if own else 0.0
                for place in range(len(own), len(order)):
                    op = order[place]
                    source = source_of[op]
                    if source >= 0:
                        index = len(done[op])
                        if index >= len(done[source]):
                            break
                        now = max(now, done[source][index] + delay_of[op])
                    now += durations[op]
                    done[op].append(now)
                    places[op].append(place)
                    own.append(now)
                    progress = True
        if any(len(own) < len(order) for own, order in zip(ends, orders, strict=True)):
            return None
        return Timed(max(own[-1] for own in ends if own), ends, places)

    def critical_blocks(self, orders: Orders, timed: Timed) -> list[tuple[int, int, int]]:
        """Stretches without a pause on the path that the makespan is the length of: rank, first and last place."""
        ends = timed.ends
        rank = max(range(self.num_ranks), key=lambda r: ends[r][-1] if ends[r] else 0.0)
        place = last = len(orders[rank]) - 1
        blocks = []
        while True:
            op = orders[rank][place]
            start = ends[rank][place] - self.durations[op]
            if place and ends[rank][place - 1] >= start * (1 - 1e-12):
                place -= 1
                continue
            blocks.append((rank, place, last))
            source = self.source[op]
            if source < 0 or (place == 0 and start == 0.0):
                return blocks
            microbatch = orders[rank][: place + 1].count(op) - 1
            rank = self.rank_of(source)
            place = last = timed.places[source][microbatch]

    def improved(self, orders: Orders, tries: int, chance: random.Random) -> tuple[float, Orders]:
        """Simulated annealing: move actions of the critical path within their rank's order, for so many tries."""
        timed = self.timed(orders)
        assert timed is not None
        best, best_span = [list(order) for order in orders], timed.makespan
        blocks = self.critical_blocks(orders, timed)
        for turn in range(tries):
            heat = _HEAT * timed.makespan * (1 - turn / tries) ** 2
            rank, first, last = chance.choice(blocks)
            # Into the block, out of it or within it.
            place = chance.randint(first, last)
            other = place + chance.randint(1, MAX_SHIFT) * chance.choice((-1, 1))
            order = orders[rank]
            if not 0 <= other < len(order) or order[place] == order[other]:
                continue
            moved = list(order)
            moved.insert(other, moved.pop(place))
            if not self.fits(moved):
                continue
            trial = [*orders[:rank], moved, *orders[rank + 1 :]]
            found = self.timed(trial)
            if found is None or found.makespan > timed.makespan + heat * -math.log(chance.random() or 1e-300):
                continue
            orders, timed = trial, found
            blocks = self.critical_blocks(orders, timed)
            if timed.makespan < best_span * (1 - 1e-12):
                best, best_span = [list(order) for order in orders], timed.makespan
        return best_span, best

    def listed(self, rule: Rule) -> Orders | None:
        """List scheduling by a rule; None where it comes to a dead end."""
        return _ListScheduling(self, rule).run()


class _ListScheduling:
    """One run over time in which each rank, whenever it is free, does what the rule prefers of what is ready."""

    def __init__(self, search: OrderSearch, rule: Rule) -> None:
        self.search, self.rule = search, rule
        self.orders: Orders = [[] for _ in range(search.num_ranks)]
        self.done: list[list[float]] = [[] for _ in search.durations]
        self.free = [0.0] * search.num_ranks
        ranks, stages = search.num_ranks, search.num_stages
        ahead = [stages - ranks + 1 + rule.hop * (ranks - 1 - rank) for rank in range(ranks)]
        self.bounds: list[list[Bound]] = [[*search.bounds, ([1.0] * stages, most)] for most in ahead]
        self.live = [[0.0] * len(bounds) for bounds in self.bounds]

    def run(self) -> Orders | None:
        search, done = self.search, self.done
        turns = [(0.0, rank) for rank in range(search.num_ranks)]
        while turns:
            now, rank = heapq.heappop(turns)
            if self.free[rank] > now:
                continue
            op, later = self._choose(rank, now)
            if op is None:
                if later < math.inf:
                    heapq.heappush(turns, (later, rank))
                continue
            end = now + search.durations[op]
            done[op].append(end)
            self.orders[rank].append(op)
            self.free[rank] = end
            self._account(op, rank)
            heapq.heappush(turns, (end, rank))
            if (user := search.user[op]) >= 0:
                heapq.heappush(turns, (end + search.delay[user], search.rank_of(user)))
        is_whole = all(len(times) == search.num_microbatches for times in done)
        return self.orders if is_whole else None

    def _choose(self, rank: int, now: float) -> tuple[int | None, float]:
        """What to do now; None to wait until the time given, or until woken where that is infinite."""
        search, rule, done = self.search, self.rule, self.done
        later = math.inf
        ready: list[tuple[bool, int, int]] = []
        weights: list[tuple[int, int]] = []
        for op in search.own[rank]:
            kind, stage = divmod(op, search.num_stages)
            microbatch, source = len(done[op]), search.source[op]
            if microbatch == search.num_microbatches or (kind and len(done[op - search.num_stages]) <= microbatch):
                continue
            if kind == 2:
                weights.append((microbatch, op))
            elif source < 0 or len(done[source]) > microbatch:
                arrival = done[source][microbatch] + search.delay[op] if source >= 0 else 0.0
                if kind == 0 and not self._has_room(rank, stage):
                    continue
                if arrival <= now:
                    ready.append(((kind == 0) != rule.forward_first, -stage if rule.deep_first else microbatch, op))
                else:
                    later = min(later, arrival)
        if ready:
            return min(ready)[-1], now
        if weights:
            weight = min(weights)[-1]
            if later >= now + rule.patience * search.durations[weight]:
                return weight, now
        return None, later

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether an F leaves room for one of each later stage on the rank, without which it could not be freed."""
        needed = [other for other in self.search.stages_on[rank] if other >= stage]
        return all(
            live + sum(sizes[other] for other in needed) <= most
            for live, (sizes, most) in zip(self.live[rank], self.bounds[rank], strict=True)
        )

    def _account(self, op: int, rank: int) -> None:
        kind, stage = divmod(op, self.search.num_stages)
        if kind in (0, self.search.last_kind):
            for index, (sizes, _) in enumerate(self.bounds[rank]):
                self.live[rank][index] += -sizes[stage] if kind else sizes[stage]
