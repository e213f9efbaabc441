"""Batch norms that share their statistics: torch has them do so over all ranks, and here those of their stage do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.plugins import LayerSync
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.runtime.replicas import Replicas


def convert_batch_norms(
    module: nn.Module, layer_sync: LayerSync | None, device: torch.device, *, num_replicas: int
) -> None:
    """Before training: do what ``Trainer(sync_batchnorm=True)`` asks for, if there is anybody to share with.

    Args:
        layer_sync: what the Trainer converts with; None if nobody asked for it.

    Raises:
        ValueError: statistics would be shared on the CPU, for which torch has no kernels.
    """
    if num_replicas == 1:
        return
    if layer_sync is not None:
        layer_sync.apply(module)
    name = next((name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)), None)
    if name is not None and device.type == "cpu":
        raise ValueError(
            f"{num_replicas} replicas are to share the statistics of {name!r}, and torch's SyncBatchNorm does not run "
            f"on the CPU: use BatchNorm layers and sync_batchnorm=False, or as many devices as stages"
        )


@contextmanager
def shared_statistics(module: nn.Module, replicas: Replicas | None) -> Iterator[None]:
    """While entered, SyncBatchNorm layers exchange with the replicas of their stage. Where there are none they are
    ordinary batch norms; those with a process group of the user's stay as they are."""
    with overridden() as override:
        for layer in _layers(module, None):
            if replicas is None:
                override(layer, "forward", MethodType(_BatchNorm.forward, layer))
            else:
                override(layer, "process_group", replicas.group)
        yield


@contextmanager
def own_statistics(module: nn.Module, replicas: Replicas | None) -> Iterator[None]:
    """While entered, those that exchange with replicas, or would, are ordinary batch norms."""
    with overridden() as override:
        for layer in _layers(module, None, replicas.group if replicas is not None else None):
            override(layer, "forward", MethodType(_BatchNorm.forward, layer))
        yield


def _layers(module: nn.Module, *groups: Any) -> list[nn.SyncBatchNorm]:
    """Those with one of these process groups."""
    return [sub for sub in module.modules() if isinstance(sub, nn.SyncBatchNorm) and sub.process_group in groups]
