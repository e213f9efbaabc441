"""What hangs on the user's objects while a trainer function runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.amp import GradScaler
from torchmetrics import Metric

from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.recorder import Recorder
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.fully_sharded import plain
from lightning_pipeline.runtime.outside import Outside
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.strategy.batch_norms import shared_statistics
from lightning_pipeline.strategy.hooks import follow_hooks
from lightning_pipeline.strategy.lightning_private import (
    Override,
    call_before_update,
    compare_parameters_by_identity,
    silence_sync_warning,
    skip_before_transfer,
)
from lightning_pipeline.strategy.signals import Signals
from lightning_pipeline.strategy.stage_optimizers import StageOptimizers


def install(
    module: LightningModule,
    plugin: Precision,
    topology: Topology,
    device: torch.device,
    *,
    replicas: Replicas | None,
    optimizers: StageOptimizers,
    outside: Outside | None,
    recorder: Recorder,
    signals: Signals,
    has_batches: bool,
    has_predictions: bool,
) -> ExitStack:
    """Let the user's precision plugin, module, metrics and Trainer do what one stage of several has to.

    Args:
        has_batches: this rank gets batches, and not only what they look like.
        has_predictions: this rank gets the outputs of predict steps.

    Returns:
        What takes all of it off again when it is closed.
    """
    silence_sync_warning()
    with ExitStack() as installed:
        override: Override = installed.enter_context(overridden())
        installed.enter_context(compare_parameters_by_identity())
        if outside is not None:
            follow_hooks(module, outside, override)
            installed.enter_context(recorder.patched())
        _clip_by(plugin, optimizers, outside, override)
        call_before_update(plugin, optimizers.before_update, override)
        if topology.world_size > 1:
            installed.enter_context(shared_statistics(module, replicas))
            signals.install(module.trainer, override, has_replicas=replicas is not None)
            if (scaler := getattr(plugin, "scaler", None)) is not None:
                agree_on_overflow(scaler, device, override)
            sync_over(module, replicas.group if replicas is not None else None, override)
        if not has_batches:
            skip_before_transfer(module, override)
        if not has_predictions:
            for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, BasePredictionWriter):
                    override(callback, "write_on_batch_end", _write_nothing)
                    override(callback, "write_on_epoch_end", _write_nothing)
        return installed.pop_all()


def _clip_by(plugin: Precision, optimizers: StageOptimizers, outside: Outside | None, override: Override) -> None:
    """Let the plugin clip by the norm over all stages."""

    def apart(clip: Callable[..., Any]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            with outside.aside() if outside is not None else nullcontext():
                clip(*args, **kwargs)

        return run

    override(plugin, "clip_grad_by_norm", apart(optimizers.clip_by_norm))
    override(plugin, "clip_grad_by_value", apart(optimizers.clip_by_value))


def _write_nothing(*arguments: Any) -> None:
    """For prediction writers."""


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
