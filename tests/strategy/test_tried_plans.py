"""Which plans are tried, and which one of them is taken."""

from __future__ import annotations

import lightning as L
import pytest
from torch import nn

from lightning_pipeline.partition.plan import StagePlan
from lightning_pipeline.strategy.tried_plans import MOST, best_tried, worth_trying

INF = float("inf")


def plan(seconds: float, bubble: float = 0.5, peak: float = 100.0) -> StagePlan:
    return StagePlan({"b": 1}, 2, 4, "1f1b", [], seconds, bubble, [10.0, peak], is_measured=True, is_best=True)


def module() -> L.LightningModule:
    made = L.LightningModule()
    made.net = nn.Linear(3, 4, bias=False)  # 48 bytes
    return made


def test_the_first_plan_is_taken_unless_another_one_is_faster_beyond_doubt() -> None:
    plans = [plan(1.0), plan(1.1), plan(1.1), plan(1.1)]
    unsure = [0.5, 1.5, 1.0, 0.9]  # its mean is lower
    assert best_tried(plans[:2], [[1.0, 1.0, 1.0, 1.0], unsure]).step_seconds == 1.0
    fast, faster = [0.9, 0.91, 0.9, 0.91], [0.8, 0.81, 0.8, 0.83]
    found = best_tried(plans, [[1.0, 1.02, 1.0, 1.04], unsure, fast, faster])
    assert found.step_seconds == pytest.approx(0.805)
    # Turns that all plans had when the machine was slow make none of them unsure.
    assert best_tried(plans[:2], [[1.0, 3.0, 1.0], [0.9, 2.85, 0.9]]).step_seconds == 0.9


def test_a_plan_that_was_tried_says_what_it_took() -> None:
    found = best_tried([plan(1.0, bubble=0.25)], [[1.4, 1.5, 1.9]])
    assert found.is_tried and found.step_seconds == 1.5
    assert found.bubble == 0.5  # as much work, in a longer step
    assert best_tried([plan(1.0, bubble=0.25)], [[0.5, 0.5, 0.5]]).bubble == 0.0


def test_plans_are_tried_that_may_be_the_best_and_take_little_time() -> None:
    def tried(*plans: StagePlan, limit: float = INF) -> list[int]:
        return [plans.index(one) for one in worth_trying(module(), plans, 8.0, limit)]

    assert tried(plan(0.01), plan(0.02), plan(0.011)) == [0, 2]
    assert tried(*(plan(0.01 + number / 1e4) for number in range(9))) == list(range(MOST))
    assert tried(plan(1.0), plan(1.0)) == [0]
    assert tried(plan(4.0)) == []
    assert tried(plan(4.0), plan(0.01)) == []  # how the first one is, nobody would know


def test_plans_are_tried_that_have_room_beside_the_whole_module() -> None:
    plans = [plan(0.01), plan(0.011, peak=110.0)]
    assert worth_trying(module(), plans, 8.0, 48 * 2 + 105.0) == plans[:1]
    assert worth_trying(module(), plans, 8.0, 48 * 2 + 95.0) == []


def test_what_is_compiled_is_not_tried() -> None:
    compiled = module()
    compiled.net.compile(backend="eager")
    assert worth_trying(compiled, [plan(0.01)], 8.0, INF) == []
