"""SyncBatchNorm layers, as far as they can be looked at without the devices that have kernels for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import TorchSyncBatchNorm
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.strategy.patches import convert_batch_norms, keep_statistics, share_statistics

REPLICAS: Any = SimpleNamespace(group=object())
DEVICE = torch.device("cuda")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.SyncBatchNorm(4, process_group="the user's"))


def ordinary(layer: nn.Module) -> bool:
    return "forward" in vars(layer) and layer.forward.__func__ is _BatchNorm.forward


def test_they_exchange_with_the_replicas_of_their_stage() -> None:
    module = layers()
    with overridden() as override:
        share_statistics(module, REPLICAS, override)
        assert [layer.process_group for layer in (module[1], module[2])] == [REPLICAS.group, "the user's"]
        assert not any(map(ordinary, module))
        with overridden() as override:
            keep_statistics(module, REPLICAS, override)  # while a cut is measured
            assert [ordinary(layer) for layer in (module[1], module[2])] == [True, False]
        assert not any(map(ordinary, module))
    assert module[1].process_group is None


def test_without_replicas_they_are_ordinary() -> None:
    module = layers()
    with overridden() as override:
        share_statistics(module, None, override)
        assert [ordinary(layer) for layer in (module[1], module[2])] == [True, False]
        with overridden() as override:
            keep_statistics(module, None, override)
            assert ordinary(module[1])
        assert ordinary(module[1])
    assert not ordinary(module[1])


@pytest.mark.parametrize(("replicas", "kind"), [(1, nn.BatchNorm1d), (2, nn.SyncBatchNorm)])
def test_sync_batchnorm_converts_where_there_is_somebody_to_share_with(replicas: int, kind: type) -> None:
    module = nn.Sequential(nn.BatchNorm1d(4))
    weight = module[0].weight
    convert_batch_norms(module, TorchSyncBatchNorm(), DEVICE, num_replicas=replicas)
    assert type(module[0]) is kind and module[0].weight is weight


def test_sharing_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 replicas are to share the statistics of '0', .* does not run on the CPU"):
        convert_batch_norms(nn.Sequential(nn.SyncBatchNorm(4)), None, torch.device("cpu"), num_replicas=2)
    convert_batch_norms(layers()[:1], None, torch.device("cpu"), num_replicas=2)
