"""Searches for the contiguous cut with the shortest simulated step that fits into memory.

A step is a row of segments, and a plan says with which of them the later stages begin::

    segments   0  1  2  3  4  5  6  7        cuts (3, 6): stages 0-2, 3-5 and 6-7

The search is exact: a depth-first branch and bound over all plans, which skips those whose lower bound is no better
than the best plan so far. A rank's bound is what PipeDream's and Alpa's formulations minimise: the time until the first
micro-batch arrives, the rank's own work on all micro-batches, and the time until the last gradient has left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_pipeline.planning.cost_model import Cuts, Evaluator, Machine, Plan, Segment
from lightning_pipeline.schedules.schedule import Kind, Schedule
from lightning_pipeline.schedules.simulation import live_activations

INF = float("inf")


def best_plans(
    segments: Sequence[Segment],
    schedule: Schedule,
    machine: Machine | None = None,
    *,
    effort: float = 2e6,
    gap: float = 0.0,
    most: int = 1,
) -> list[Plan]:
    """The fastest plan, or where none fits the memory, the one that lacks the least; then the next best of those that
    the search has simulated.

    Args:
        schedule: with whole or split backwards; it determines the number and placement of virtual stages.
        effort: actions to simulate, and stages to bound, after which the search ends with the best plan so far; a
            million take a few seconds. It is no time, so that the same costs give the same plan.
        gap: the search goes on only for plans that are faster by this share.
    """
    evaluator = Evaluator(segments, schedule, machine or Machine())
    first = _Search(evaluator).run(effort, gap)
    others = [plan for plan in evaluator.plans.values() if plan.cuts != first.cuts]
    return [first, *sorted(others, key=_preference)[: most - 1]]


class _Search:
    """Branch and bound over the plans of one step under one schedule."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._costs = evaluator
        self._live = live_activations(evaluator.schedule, evaluator.machine.offload)
        self._num_actions = sum(len(order) for order in evaluator.schedule.orders)
        self._limit = INF
        self._effort = INF
        # Nothing waits for a rank's last gradients of weights, so where backwards are split only the way to a rank
        # counts, and with whole ones the way back, too.
        splits = any(action.kind is Kind.W for order in evaluator.schedule.orders for action in order)
        both = [f + b for f, b in zip(evaluator.forward, evaluator.backward, strict=True)]
        self._ways = evaluator.forward if splits else both
        self._num_ways = 1 if splits else 2

    def run(self, effort: float, gap: float) -> Plan:
        """The best plan, or one that is as good within `gap`."""
        self._effort = effort
        best = self._improved(min(map(self._plan, map(self._least, (self._both, self._bytes))), key=_preference))
        self._limit = _limit(best, gap)
        for cuts in self._candidates():
            best = min(best, self._plan(cuts), key=_preference)
            self._limit = _limit(best, gap)
        return replace(best, is_best=self._effort > 0)

    def _plan(self, cuts: Cuts) -> Plan:
        self._effort -= self._num_actions * (cuts not in self._costs.plans)
        return self._costs.plan(cuts)

    def _least(self, measure: Callable[[int, int, int], float]) -> Cuts:
        """The cut whose worst stage is the best, by dynamic programming. `measure` takes a stage, start and stop."""
        total, count = self._costs.num_stages, len(self._costs.segments)
        worst = [[INF] * (count + 1) for _ in range(total + 1)]
        came = [[0] * (count + 1) for _ in range(total + 1)]
        worst[0][0] = 0.0
        for stage in range(total):
            for stop in range(stage + 1, count - (total - stage - 1) + 1):
                for start in range(stage, stop):
                    value = max(worst[stage][start], measure(stage, start, stop))
                    if value < worst[stage + 1][stop]:
                        worst[stage + 1][stop], came[stage + 1][stop] = value, start
        cuts: list[int] = []
        stop = count
        for stage in range(total, 1, -1):
            stop = came[stage][stop]
            cuts.insert(0, stop)
        return tuple(cuts)

    def _improved(self, plan: Plan) -> Plan:
        """Move one cut at a time for as long as that helps."""
        before = None
        while plan is not before and self._effort > 0:
            before = plan
            for index in range(len(plan.cuts)):
                for move in (-1, 1, -2, 2):
                    cuts = (*plan.cuts[:index], plan.cuts[index] + move, *plan.cuts[index + 1 :])
                    if all(a < b for a, b in pairwise((0, *cuts, len(self._costs.segments)))):
                        plan = min(plan, self._plan(cuts), key=_preference)
        return plan

    def _candidates(self) -> Iterator[Cuts]:
        """All cuts whose bound is below the limit, and that may fit the memory."""
        costs, m = self._costs, self._costs.schedule.num_microbatches
        count, total, num_ranks = len(costs.segments), costs.num_stages, costs.schedule.num_ranks
        combined_speed = sum(costs.machine.speed(rank) for rank in range(num_ranks))
        # No cut is faster than all ranks that are busy all the time.
        never_idle = m * (costs.forward[-1] + costs.backward[-1]) / combined_speed
        rest = self._bound_of_rest() if total == num_ranks else None
        loads = [0.0] * num_ranks
        reached = [-1.0] * num_ranks

        def visit(stage: int, start: int, cuts: Cuts, before: float) -> Iterator[Cuts]:
            """`before`: seconds of one micro-batch on its way through the earlier stages, and back."""
            if self._effort <= 0:
                return
            rank = costs.placement[stage]
            came = reached[rank]
            if came < 0:
                reached[rank] = before
            stops = [count] if stage == total - 1 else range(start + 1, count - (total - stage - 1) + 1)
            for stop in stops:
                self._effort -= 1
                work = self._both(stage, start, stop)
                own = reached[rank] + m * (loads[rank] + work)
                if own >= self._limit:
                    break  # with more segments the bound only grows
                bound = max(own, never_idle)
                if rest is not None and stage + 1 < total:
                    bound = max(bound, rest[stage + 1][stop])
                if bound >= self._limit or self._bytes(stage, start, stop) > costs.machine.limit(rank):
                    continue
                if stage == total - 1:
                    yield cuts
                    continue
                loads[rank] += work
                crosses = costs.placement[stage + 1] != rank
                passed = before + costs.work(self._ways, stage, start, stop)
                passed += self._num_ways * costs.machine.transfer(costs.segments[stop]) * crosses
                yield from visit(stage + 1, stop, (*cuts, stop), passed)
                loads[rank] -= work
            reached[rank] = came

        return visit(0, 0, (), 0.0)

    def _bound_of_rest(self) -> list[list[float]]:
        """``[stage][segment]``: the bound of the stages from this one on, if it begins with this segment.

        Each rank has one stage. Transfers are left out, as they depend on the earlier cuts.
        """
        costs, m = self._costs, self._costs.schedule.num_microbatches
        count, total = len(costs.segments), costs.num_stages
        # What comes before a stage takes at least as long as on the fastest rank.
        fastest = max(costs.machine.speed(rank) for rank in range(costs.schedule.num_ranks))
        bounds = [[INF] * (count + 1) for _ in range(total + 1)]
        bounds[total][count] = 0.0
        for stage in range(total - 1, -1, -1):
            for start in range(stage, count):
                before = self._ways[start] / fastest
                for stop in range(start + 1, count + 1):
                    own = before + m * self._both(stage, start, stop)
                    if own >= bounds[stage][start]:
                        break
                    bounds[stage][start] = min(bounds[stage][start], max(own, bounds[stage + 1][stop]))
        return bounds

    def _both(self, stage: int, start: int, stop: int) -> float:
        """Seconds of forward and backward."""
        costs = self._costs
        return costs.work(costs.forward, stage, start, stop) + costs.work(costs.backward, stage, start, stop)

    def _bytes(self, stage: int, start: int, stop: int) -> float:
        """What a stage by itself holds at least, at its peak."""
        costs = self._costs
        kept = costs.kept[stop] - costs.kept[start] + costs.segments[start].received
        return costs.unshared_state[stop] - costs.unshared_state[start] + self._live[stage] * kept


def _preference(plan: Plan) -> tuple[float, float]:
    """Plans that fit come before those that do not, then the faster ones."""
    return plan.excess, plan.seconds


def _limit(plan: Plan, gap: float) -> float:
    """Bounds below this are worth a look: any, as long as no plan fits."""
    return INF if plan.excess else plan.seconds * (1 - gap)
