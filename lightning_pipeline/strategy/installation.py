"""What hangs on the user's objects while a trainer function runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.amp import GradScaler
from torchmetrics import Metric

from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.fully_sharded import plain
from lightning_pipeline.strategy.lightning_private import Override


def silence_writers(trainer: Trainer, override: Override) -> None:
    """Have prediction writers write nothing on a rank that has no predictions."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BasePredictionWriter):
            override(callback, "write_on_batch_end", _write_nothing)
            override(callback, "write_on_epoch_end", _write_nothing)


def _write_nothing(*arguments: Any) -> None:
    pass


def agree_on_overflow(scaler: GradScaler, device: torch.device, override: Override) -> None:
    """Make `scaler` skip steps and change its scale as one scaler of the whole model would.

    A rank's scaler looks for infinities in its own gradients, and has nothing to look at where a stage is frozen. So
    what it found is replaced by the largest of all ranks; every rank unscales once a step, also where it has none.
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
        if hasattr(scaler, "_has_overflow"):  # where torch_npu's scaler notes it once more, to change the scale by
            scaler._has_overflow |= bool(worst)
        return {device: worst}

    override(scaler, "_unscale_grads_", all_gradients)


def sync_over(module: nn.Module, replicas: dist.ProcessGroup | None, override: Override) -> None:
    """Make the metrics in a module synchronise their states over the replicas of a stage, as all stages have the same.

    Args:
        module: the module whose submodules are searched for metrics, those in a ``MetricCollection`` included.
        replicas: the ranks that run this stage on other samples; None if there are none.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            override(metric, "process_group", replicas)
            override(metric, "distributed_available_fn", lambda: replicas is not None)
