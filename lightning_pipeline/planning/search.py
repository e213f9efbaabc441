"""Searches for the contiguous cut with the shortest simulated step that fits into memory.

A step is a row of segments, and a plan says with which of them the later stages begin. The search is exact: it goes
through the plans depth first, and leaves out those whose lower bound is no better than the best plan found so far. The
bound of a rank is what PipeDream's and Alpa's formulations minimise: the time until the first micro-batch has come to
it, its own work on all micro-batches, and the time until the last gradient has gone back from it. Where a rank has one
stage there is another: from its first forward to its first backward one micro-batch goes all the way and comes back,
and what the rank does before its first backward, and after its last forward, is known from the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_pipeline.planning.cost_model import Cuts, Evaluator, Machine, Plan, Segment
from lightning_pipeline.schedules.schedule import Kind, Schedule
from lightning_pipeline.schedules.simulation import live_activations


def best_plans(
    segments: Sequence[Segment],
    schedule: Schedule,
    machine: Machine | None = None,
    *,
    effort: float = 2e6,
    gap: float = 0.0,
    most: int = 1,
) -> list[Plan]:
    """The plan of the least time; where none fits the memory, the one that lacks the least. After it come the next ones
    of those that the search has looked at, by their time.

    Args:
        schedule: with whole backwards or split ones; it says the number of virtual stages and where they are.
        effort: actions to simulate, and stages to bound, after which the search ends with the best plan so far; a
            million take a few seconds. No time, so that the same costs give the same plan.
        gap: a plan that much faster, as a share, is worth going on for.
        most: plans in all.

    Raises:
        ScheduleError: fewer segments than virtual stages.
    """
    made = Evaluator(segments, schedule, machine or Machine())
    first = _Search(made).run(effort, gap)
    others = [plan for plan in made.plans.values() if plan.cuts != first.cuts]
    return [first, *sorted(others, key=lambda plan: (plan.excess, plan.seconds))[: most - 1]]


class _Search:
    """Goes through the plans of one step under one schedule."""

    def __init__(self, made: Evaluator) -> None:
        self._made = made
        self._live = live_activations(made.schedule)
        # Behind a rank's last gradients of weights nothing waits, so that only the way to it counts.
        splits = any(action.kind is Kind.W for order in made.schedule.orders for action in order)
        self._ways = made.forward if splits else [f + b for f, b in zip(made.forward, made.backward, strict=True)]
        self._sends = 1 if splits else 2
        is_simple = made.num_stages == made.schedule.num_ranks and not splits
        self._before, self._early = _warm_up(made.schedule) if is_simple else ([], [])
        speeds = [made.machine.speed(rank) for rank in range(made.schedule.num_ranks)]
        self._round_trip = (made.forward[-1] + made.backward[-1]) / max(speeds)
        self._round_trip += 2 * made.num_stages * made.machine.overhead
        self._sizes: dict[tuple[int, int, int], float] = {}
        self._limit = float("inf")
        self._effort = float("inf")
        self._num_actions = sum(len(order) for order in made.schedule.orders)

    def run(self, effort: float, gap: float) -> Plan:
        """The best plan, or one that is as good within `gap`."""
        self._effort = effort
        best = self._plan(self._least(self._both))
        best = self._improved(_better(best, self._plan(self._least(self._bytes))))
        self._limit = _limit(best, gap)
        for cuts in self._candidates():
            best = _better(best, self._plan(cuts))
            self._limit = _limit(best, gap)
        return replace(best, is_best=self._effort > 0)

    def _plan(self, cuts: Cuts) -> Plan:
        self._effort -= self._num_actions * (cuts not in self._made.plans)
        return self._made.plan(cuts)

    def _least(self, measure: Callable[[int, int, int], float]) -> Cuts:
        """The cut whose worst stage is the best, by dynamic programming. `measure` takes a stage, start and stop."""
        total, count = self._made.num_stages, len(self._made.segments)
        inf = float("inf")
        worst = [[inf] * (count + 1) for _ in range(total + 1)]
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
                    if all(a < b for a, b in pairwise((0, *cuts, len(self._made.segments)))):
                        plan = _better(plan, self._plan(cuts))
        return plan

    def _candidates(self) -> Iterator[Cuts]:
        """All cuts whose bound is below the limit, and that may fit the memory."""
        count, total = len(self._made.segments), self._made.num_stages
        m = self._made.schedule.num_microbatches
        num_ranks = self._made.schedule.num_ranks
        speeds = [self._made.machine.speed(rank) for rank in range(num_ranks)]
        speed = sum(speeds)  # of all ranks together
        whole = self._made.forward[-1] + self._made.backward[-1]
        rest = self._bound_of_rest() if total == num_ranks else None
        loads = [0.0] * num_ranks
        reached = [-1.0] * num_ranks

        def visit(stage: int, start: int, cuts: Cuts, before: float) -> Iterator[Cuts]:
            """`before`: seconds of one micro-batch on its way through the stages before, and back."""
            if self._effort <= 0:
                return
            rank = self._made.placement[stage]
            came = reached[rank]
            if came < 0:
                reached[rank] = before
            stops = [count] if stage == total - 1 else range(start + 1, count - (total - stage - 1) + 1)
            for stop in stops:
                self._effort -= 1
                work = self._both(stage, start, stop)
                loads[rank] += work
                own = max(reached[rank] + m * loads[rank], self._by_warm_up(stage, start, stop))
                if own >= self._limit:
                    loads[rank] -= work
                    break  # with more segments the bound only grows
                bound = max(own, m * whole / speed)
                if rest is not None and stage + 1 < total:
                    bound = max(bound, rest[stage + 1][stop])
                if bound < self._limit and self._may_fit(stage, start, stop):
                    if stage == total - 1:
                        yield cuts
                    else:
                        away = self._made.placement[stage + 1] != rank
                        passed = before + self._made.work(self._ways, stage, start, stop)
                        passed += self._sends * self._made.transfer(stop) * away
                        yield from visit(stage + 1, stop, (*cuts, stop), passed)
                loads[rank] -= work
            reached[rank] = came

        return visit(0, 0, (), 0.0)

    def _bound_of_rest(self) -> list[list[float]]:
        """``[stage][segment]``: the bound of the stages from this one on, if it begins with this segment.

        Each rank has one stage; transfers are left out, as they depend on the cuts before.
        """
        count, total = len(self._made.segments), self._made.num_stages
        m = self._made.schedule.num_microbatches
        # What is before a stage takes at least as long as on the fastest rank.
        fastest = max(self._made.machine.speed(rank) for rank in range(self._made.schedule.num_ranks))
        inf = float("inf")
        bounds = [[inf] * (count + 1) for _ in range(total + 1)]
        bounds[total][count] = 0.0
        for stage in range(total - 1, -1, -1):
            for start in range(stage, count):
                before = self._ways[start] / fastest
                for stop in range(start + 1, count + 1):
                    own = max(before + m * self._both(stage, start, stop), self._by_warm_up(stage, start, stop))
                    if own >= bounds[stage][start]:
                        break
                    bounds[stage][start] = min(bounds[stage][start], max(own, bounds[stage + 1][stop]))
        return bounds

    def _by_warm_up(self, stage: int, start: int, stop: int) -> float:
        """The bound of a rank by its warm-up and its cool-down."""
        if not self._before:
            return 0.0
        made, m = self._made, self._made.schedule.num_microbatches
        forward = made.work(made.forward, stage, start, stop)
        backward = made.work(made.backward, stage, start, stop)
        return self._round_trip + max(
            (m - 1) * backward + (m - self._before[stage]) * forward,
            (m - 1) * forward + self._early[stage] * backward,
        )

    def _both(self, stage: int, start: int, stop: int) -> float:
        made = self._made
        return made.work(made.forward, stage, start, stop) + made.work(made.backward, stage, start, stop)

    def _may_fit(self, stage: int, start: int, stop: int) -> bool:
        """Whether a stage by itself fits its rank."""
        limit = self._made.machine.limit(self._made.placement[stage])
        if limit == float("inf"):
            return True
        return self._bytes(stage, start, stop) <= limit

    def _bytes(self, stage: int, start: int, stop: int) -> float:
        """What a stage by itself holds at most."""
        if (stage, start, stop) not in self._sizes:
            kept = self._made.kept[stop] - self._made.kept[start] + self._made.segments[start].received
            self._sizes[stage, start, stop] = self._made.state([(start, stop)]) + self._live[stage] * kept
        return self._sizes[stage, start, stop]


def _warm_up(schedule: Schedule) -> tuple[list[int], list[int]]:
    """For each rank, with one stage each, its forwards before its first backward, and its backwards before its last
    forward."""
    before, early = [], []
    for order in schedule.orders:
        kinds = [action.kind for action in order]
        before.append(kinds.index(Kind.B))
        early.append(kinds[: len(kinds) - kinds[::-1].index(Kind.F)].count(Kind.B))
    return before, early


def _better(best: Plan, other: Plan) -> Plan:
    """Of two plans; those that fit come before those that do not, then the faster."""
    return other if (other.excess, other.seconds) < (best.excess, best.seconds) else best


def _limit(plan: Plan, gap: float) -> float:
    """Bounds below this are worth a look: any, as long as no plan fits."""
    return float("inf") if plan.excess else plan.seconds * (1 - gap)
