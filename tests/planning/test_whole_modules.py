"""Modules that are called several times are shared out as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.planning.planner import plan_of_modules
from lightning_pipeline.planning.tracing import trace_step
from lightning_pipeline.schedules import Schedule, build


class Rival(nn.Module):
    """One module makes what another one judges, twice."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.judge = nn.Linear(8, 1)
        self.maker = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        return (self.judge(self.maker(x)) - self.judge(self.maker(x + 1))).sum()


class Alone(nn.Module):
    """There is but one module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def _plan(module: nn.Module, schedule: Schedule) -> StagePlan | None:
    traced = trace_step(module, module, torch.ones(4, 8))
    times = [1.0] * len(traced.positions)
    return plan_of_modules(traced.timed(times, times), schedule, lambda name: 1.0)


def test_each_module_has_a_stage_in_the_order_of_first_calls() -> None:
    plan = _plan(Rival(), build("1f1b", 2, 4))
    assert plan is not None
    assert plan.stage_config == {"maker": 0, "judge": 1}
    assert [stage.parameter_bytes for stage in plan.stages] == [4.0, 2.0]


def test_the_largest_comes_apart_where_there_are_too_few() -> None:
    plan = _plan(Rival(depth=4), build("1f1b", 3, 4))
    assert plan is not None
    assert {*plan.stage_config} == {"judge", "maker.0", "maker.1", "maker.2", "maker.3"}
    assert [*dict.fromkeys(plan.stage_config.values())] == [0, 1, 2]


@pytest.mark.parametrize(
    ("module", "schedule"),
    [
        (Alone(), build("1f1b", 2, 4)),
        (Rival(), build("1f1b", 4, 4)),
        (Rival(), build("interleaved_1f1b", 2, 4, 2)),
    ],
)
def test_there_may_be_too_few_modules(module: nn.Module, schedule: Schedule) -> None:
    assert _plan(module, schedule) is None
