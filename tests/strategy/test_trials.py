"""Which plans are tried, and which one of them is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import lightning as L
from torch import nn

from lightning_pipeline.planning.plan import StagePlan, plan_table
from lightning_pipeline.strategy.trials import MOST, best_tried, choose_plan, worth_trying

INF = float("inf")


def plan(seconds: float, bubble: float = 0.5, peak: float = 100.0) -> StagePlan:
    return StagePlan({"b": 1}, 2, 4, "1f1b", [], seconds, bubble, [10.0, peak], is_measured=True, is_best=True)


class OnPaper:
    """Steps of a plan take what its first key says, in seconds."""

    def __init__(self) -> None:
        self.tried: list[list[float]] = []

    def choose(self, *ranked: StagePlan) -> StagePlan:
        return choose_plan(lambda: ranked, self._times, module(), lambda function: function(), INF)

    def _times(self, plans: Sequence[StagePlan]) -> list[list[float]]:
        takes = [float(next(iter(plan.stage_config))) for plan in plans]
        self.tried.append(takes)
        return [[seconds, seconds * 1.01, seconds * 0.99] for seconds in takes]


def taking(seconds: float, *, expected: float) -> StagePlan:
    return replace(plan(expected), stage_config={str(seconds): 1})


def module() -> L.LightningModule:
    made = L.LightningModule()
    made.net = nn.Linear(3, 4, bias=False)  # 48 bytes
    return made


def test_the_plan_is_taken_that_was_the_fastest() -> None:
    plans = [plan(1.0), replace(plan(1.1), stage_config={"c": 1})]
    for times, taken in (
        ([[1.0, 1.1, 1.2], [0.9, 1.0, 1.1]], "c"),
        ([[1.0, 1.1, 1.2], [0.9, 1.1, 5.0]], "b"),  # alike: the first one is preferred
        ([[1.0, 1.1, 9.0], [1.2, 1.2, 1.2]], "b"),  # what else the machine did once does not count
    ):
        assert best_tried(plans, times).stage_config == {taken: 1}


def test_a_plan_that_was_tried_says_what_it_took() -> None:
    found = best_tried([plan(1.0, bubble=0.25)], [[1.4, 1.5, 1.9]])
    assert found.is_tried and found.step_seconds == 1.5
    assert "1500 ms a step when it was tried" in str(plan_table(found).title)
    assert "bubble" not in str(plan_table(found).title)  # which nobody has measured
    expected = plan_table(plan(1.0, bubble=0.25)).title
    assert "1000 ms a step and a bubble of 25.0% expected, from measured times" in str(expected)


def test_the_best_are_tried_together() -> None:
    trials = OnPaper()
    assert trials.choose(taking(0.15, expected=0.1), taking(0.12, expected=0.11)).step_seconds == 0.12
    assert trials.tried == [[0.15, 0.12]]


def test_what_takes_too_long_is_not_tried() -> None:
    trials = OnPaper()
    slow = taking(9.0, expected=9.0)
    assert trials.choose(slow) == slow
    assert not trials.tried


def test_sums_over_replicas_are_added_as_simulated() -> None:
    little, much = (replace(plan(1.0), reduction_seconds=seconds) for seconds in (0.25, 0.5))
    found = best_tried([little, much], [[1.0, 1.0, 1.0], [0.9, 0.9, 0.9]])
    assert found.step_seconds == 1.25 and found.reduction_seconds == 0.25


def test_plans_are_tried_that_may_be_the_best_and_take_little_time() -> None:
    def tried(*plans: StagePlan, limit: float = INF) -> list[int]:
        return [plans.index(one) for one in worth_trying(module(), plans, limit)]

    assert tried(plan(0.01), plan(0.02), plan(0.011)) == [0, 2]
    assert tried(*(plan(0.01 + number / 1e4) for number in range(9))) == list(range(MOST))
    assert tried(plan(0.5), plan(0.5)) == [0]
    assert tried(plan(4.0)) == []
    assert tried(plan(4.0), plan(0.01)) == []  # how the first one is, nobody would know


def test_plans_are_tried_that_have_room_beside_the_whole_module() -> None:
    plans = [plan(0.01), plan(0.011, peak=110.0)]
    assert worth_trying(module(), plans, 48 * 2 + 105.0) == plans[:1]
    assert worth_trying(module(), plans, 48 * 2 + 95.0) == []


def test_what_is_compiled_is_not_tried() -> None:
    compiled = module()
    compiled.net.compile(backend="eager")
    assert worth_trying(compiled, [plan(0.01)], INF) == []
