"""Metrics put together what the replicas of a stage have, and nothing else."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from torch import nn
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
    kept = pickle.loads(pickle.dumps(module.mean))  # as hyper-parameters in a checkpoint
    assert kept.process_group is None and kept.dist_sync_fn is None
    assert kept.distributed_available_fn is MeanMetric().distributed_available_fn
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    assert not module.mean.distributed_available_fn()
    return found


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
