"""Metrics put together what the replicas of a stage have, and nothing else."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.strategy.patches import leave_synced_over, sync_over
from tests.launching import launch


class Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.several = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()})


def computed(pairs: bool, after: bool) -> list[float]:
    """On four ranks, of which each two are replicas of one another, in a run or after it."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=4)
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    replicas = groups[rank // 2] if pairs else None
    module, beside = Metrics(), {"mean": MeanMetric()}
    for _ in range(2):  # as in one run after another
        with overridden() as override:
            sync_over(replicas, override)
            made = SumMetric()
            for metric in (module.mean, module.several, beside["mean"], made):
                metric.reset()
                metric.update(float(rank))
            if not after:
                found = values_of(module, beside["mean"], made)
        leave_synced_over(replicas)
    if after:
        found = values_of(module, beside["mean"], made)
    SingleDeviceStrategy(accelerator=CPUAccelerator()).setup_environment()  # another run, which is not this package's
    assert float(computed_of(made, 1.0)) == 4
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def computed_of(metric: SumMetric, value: float) -> Tensor:
    metric.reset()
    metric.update(value)
    return metric.compute()


def values_of(module: Metrics, beside: MeanMetric, made: SumMetric) -> list[float]:
    copied = copy.deepcopy(module.mean)
    several = module.several.compute()["sum"]
    return [float(value) for value in (copied.compute(), beside.compute(), several, made.compute())]


@pytest.mark.multiprocess
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_metrics_go_over_replicas_alone(pairs: bool, after: bool) -> None:
    first, second = [0.5, 0.5, 1.0, 1.0], [2.5, 2.5, 5.0, 5.0]
    expected = [first, first, second, second] if pairs else [[float(k)] * 4 for k in range(4)]
    assert launch(computed, pairs, after, world=4) == expected
