"""Batch norms that share their statistics: torch has them do so over all ranks, and here those of their stage do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from lightning.pytorch.plugins import LayerSync
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

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


def share_statistics(module: nn.Module, replicas: Replicas | None) -> Callable[[], None]:
    """Let SyncBatchNorm layers exchange with the replicas of their stage. Where there are none they are ordinary batch
    norms; those with a process group of the user's stay as they are. Returns a function that undoes it."""
    layers = [layer for layer in _sync_batch_norms(module) if layer.process_group is None]
    if replicas is None:
        return _as_ordinary(layers)
    for layer in layers:
        layer.process_group = replicas.group

    def undo() -> None:
        for layer in layers:
            layer.process_group = None

    return undo


@contextmanager
def own_statistics(module: nn.Module, replicas: Replicas | None) -> Iterator[None]:
    """While entered, they wait for no replica."""
    shared = (None, replicas.group) if replicas is not None else (None,)
    undo = _as_ordinary([layer for layer in _sync_batch_norms(module) if layer.process_group in shared])
    try:
        yield
    finally:
        undo()


def _as_ordinary(layers: list[nn.SyncBatchNorm]) -> Callable[[], None]:
    before = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = MethodType(_BatchNorm.forward, layer)

    def undo() -> None:
        for layer, forward in before:
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = forward

    return undo


def _sync_batch_norms(module: nn.Module) -> list[nn.SyncBatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
