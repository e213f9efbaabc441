"""Changes to prediction writers, gradient scalers, metrics and batch norms during a run."""

from __future__ import annotations

from contextlib import ExitStack
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torchmetrics import Metric

from lightning_pipeline import _torch
from lightning_pipeline.engine.slices import plain
from lightning_pipeline.partition.overrides import Override, overridden
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.replicas import Replicas

from .._lightning import BasePredictionWriter, LayerSync, Strategy, Trainer


def silence_writers(trainer: Trainer, override: Override) -> None:
    """Keep prediction writers from writing on a rank that has no predictions."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BasePredictionWriter):
            for method in ("write_on_batch_end", "write_on_epoch_end"):
                override(callback, method, lambda *args: None)


def agree_on_overflow(scaler: GradScaler, device: torch.device, override: Override) -> None:
    """Make `scaler` skip steps and change its scale as one scaler of the whole model would.

    A rank's scaler looks for infinities in its own gradients only, of which a frozen stage has none. So its finding is
    replaced by the maximum over all ranks. Every rank unscales once per step, even without gradients.
    """
    own_gradients = scaler._unscale_grads_

    def all_gradients(optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        groups = [{"params": plain(group["params"])} for group in optimizer.param_groups]
        found = own_gradients(SimpleNamespace(param_groups=groups), *args)  # type: ignore[arg-type]
        worst = torch.zeros((), dtype=torch.float32, device=device)
        for value in found.values():
            worst = torch.maximum(worst, value.to(device))
        with waiting_for("whether gradients of another rank are infinite"):
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if hasattr(scaler, "_has_overflow"):  # torch_npu's scaler changes its scale by this flag
            scaler._has_overflow |= bool(worst)
        return {device: worst}

    override(scaler, "_unscale_grads_", all_gradients)


def sync_over(replicas: dist.ProcessGroup | None, override: Override) -> None:
    """Make metrics synchronise over the replicas of a stage only, wherever they are kept: all stages have the same
    states. This holds for as long as there is the process group.
    """
    original, world = Metric.sync, dist.group.WORLD

    def sync(
        metric: Metric,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        if process_group is None and metric.process_group is None and dist.group.WORLD is world:
            process_group = replicas
            should_sync = should_sync and replicas is not None
        original(metric, dist_sync_fn, process_group, should_sync, distributed_available)

    override(Metric, "sync", sync)


def leave_synced_over(replicas: dist.ProcessGroup | None) -> None:
    """After a run: let metrics go on as in it, until a Trainer begins its next, whatever its strategy. One that is
    computed meanwhile must not count every stage.
    """
    left = ExitStack()
    override = left.enter_context(overridden())
    sync_over(replicas, override)
    set_up = Strategy.setup_environment

    def setup_environment(strategy: Strategy) -> None:
        left.close()
        set_up(strategy)

    override(Strategy, "setup_environment", setup_environment)


def convert_batch_norms(
    module: nn.Module, layer_sync: LayerSync | None, device: torch.device, *, num_replicas: int
) -> None:
    """Before training: do what ``Trainer(sync_batchnorm=True)`` asks for, if there are several replicas.

    Raises:
        ValueError: statistics would be shared on the CPU, where torch's SyncBatchNorm does not run.
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


def share_statistics(module: nn.Module, replicas: Replicas | None, override: Override) -> None:
    """Let SyncBatchNorm layers synchronise over the replicas of their stage. Without replicas they are ordinary batch
    norms. Layers with a process group of the user's stay as they are."""
    if replicas is None:
        keep_statistics(module, None, override)
        return
    for layer in module.modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.process_group is None:
            override(layer, "process_group", replicas.group)


def keep_statistics(module: nn.Module, replicas: Replicas | None, override: Override) -> None:
    """Let SyncBatchNorm layers that synchronise over replicas, or would, be ordinary batch norms."""
    groups = (None, replicas.group if replicas is not None else None)
    for layer in module.modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.process_group in groups:
            override(layer, "forward", MethodType(_torch.BatchNorm.forward, layer))
