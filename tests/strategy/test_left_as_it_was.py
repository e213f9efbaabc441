"""Trials of cuts leave the module as it was, each for the next one."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_pipeline.planning.observing import left_as_it_was
from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.planning.trace import DeviceSpeed, trace_step
from lightning_pipeline.strategy.trials import fault_of_cut

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Metered(L.LightningModule):
    """Its loss comes out of a metric, which keeps sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.mean = MeanMetric()

    def training_step(self, x: Tensor) -> Tensor:
        return self.mean(self.layers(x).mean())


def test_what_a_metric_keeps_of_a_trial_is_nothing_to_the_next() -> None:
    module = Metered()
    for name in ("layers.1", "layers.2", "layers.3"):
        plan = StagePlan({name: 1}, 2, 4, "1f1b", [None, None], 1.0, 0.0, [0, 0], True, True)  # type: ignore[list-item]
        assert fault_of_cut(module, plan, module.training_step, X) == ""
    assert float(module.mean.mean_value) == 0
    assert all(type(value) is Tensor for value in module.mean._buffers.values())


class Following(nn.Module):
    """A teacher follows in the step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.student, self.how = nn.Linear(4, 4), how
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        teacher, student = list(self.teacher.parameters()), list(self.student.parameters())
        with torch.no_grad():
            if self.how == "foreach":
                torch._foreach_mul_(teacher, 0.5)
            for t, s in zip(teacher, student, strict=True):
                if self.how == "in place":
                    t.mul_(0.5).add_(s + 1)
                elif self.how == "data in place":
                    t.data.view(-1).mul_(0.5)
                elif self.how == "data":
                    t.data = t.data * 0.5 + s.data
        return (self.student(x) - self.teacher(x)).pow(2).mean()


@pytest.mark.parametrize("how", ["in place", "data in place", "data", "foreach"])
def test_parameters_that_a_step_writes_into_are_put_back(how: str) -> None:
    module = Following(how)
    parameters = dict(module.named_parameters())
    before = {name: value.clone() for name, value in parameters.items()}
    with left_as_it_was(module):
        trace_step(module, module, X, DeviceSpeed(flops=1e9, memory_bytes=1e15))
        with left_as_it_was(module):
            now = module.teacher.weight.clone()
            module(X)
        assert torch.equal(module.teacher.weight, now)
        module(X)
        assert not torch.equal(module.teacher.weight, before["teacher.weight"])
    assert all(value is parameters[name] for name, value in module.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.named_parameters())
