"""Metrics put together what the replicas of a stage have, and nothing else."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_pipeline.strategy.patches import sync_over
from tests.launching import launch


class Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.several = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()})


def computed(pairs: bool) -> list[float]:
    """On four ranks, of which each two are replicas of one another."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=4)
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    module = Metrics()
    for _ in range(2):  # as in one run after another
        sync_over(module, groups[rank // 2] if pairs else None)
    module.mean.update(float(rank))
    module.several.update(float(rank))
    kept = pickle.loads(pickle.dumps(module.mean))  # as hyper-parameters in a checkpoint
    copied = copy.deepcopy(module.mean)
    found = [float(copied.compute()), float(module.mean.compute()), float(module.several.compute()["sum"])]
    assert kept.process_group is None and kept.dist_sync_fn is None
    assert kept.distributed_available_fn is MeanMetric().distributed_available_fn
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    assert not module.mean.distributed_available_fn()
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("pairs", [True, False])
def test_metrics_go_over_replicas_alone(pairs: bool) -> None:
    expected = (
        [[0.5, 0.5, 1.0], [0.5, 0.5, 1.0], [2.5, 2.5, 5.0], [2.5, 2.5, 5.0]]
        if pairs
        else [[float(k)] * 3 for k in range(4)]
    )
    assert launch(computed, pairs, world=4) == expected
