"""What hangs on the user's objects while a trainer function runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision

from lightning_pipeline.partition.recorder import Recorder
from lightning_pipeline.runtime.outside import Outside
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.strategy.batch_norms import shared_statistics
from lightning_pipeline.strategy.hooks import follow_hooks
from lightning_pipeline.strategy.lightning_private import (
    call_before_update,
    compare_parameters_by_identity,
    silence_sync_warning,
    skip_before_transfer,
)
from lightning_pipeline.strategy.loss_scaling import agree_on_overflow
from lightning_pipeline.strategy.metrics import sync_over
from lightning_pipeline.strategy.signals import Signals
from lightning_pipeline.strategy.stage_optimizers import StageOptimizers
from lightning_pipeline.strategy.writers import silence_writers


def install(
    module: LightningModule,
    plugin: Precision,
    topology: Topology,
    device: torch.device,
    *,
    replicas: Replicas | None,
    optimizers: StageOptimizers | None,
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
        installed.callback(compare_parameters_by_identity())
        if outside is not None:
            installed.callback(follow_hooks(module, outside))
            outside.states.optimizers = [layout.optimizer for layout in optimizers or ()]
            outside.states.are_shared_out = optimizers is not None and optimizers.are_shared_out
            installed.enter_context(recorder.patched())
        if optimizers is not None:
            installed.callback(_clip_by(plugin, optimizers, outside))
            installed.callback(call_before_update(plugin, optimizers.before_update))
        if topology.world_size > 1:
            installed.enter_context(shared_statistics(module, replicas))
            installed.callback(signals.install(module.trainer, has_replicas=replicas is not None))
            scaler = getattr(plugin, "scaler", None)
            if scaler is not None:
                installed.callback(agree_on_overflow(scaler, device))
            group = replicas.group if replicas is not None else None
            installed.callback(sync_over(module, group))
        if not has_batches:
            installed.callback(skip_before_transfer(module))
        if not has_predictions:
            installed.callback(silence_writers(module.trainer))
        return installed.pop_all()


def _clip_by(plugin: Precision, optimizers: StageOptimizers, outside: Outside | None) -> Callable[[], None]:
    """Let the plugin clip by the norm over all stages. Returns a function that undoes it."""

    def apart(clip: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            with outside.aside() if outside is not None else nullcontext():
                clip(*args, **kwargs)

        return run

    own = {"clip_grad_by_norm": apart(optimizers.clip_by_norm), "clip_grad_by_value": apart(optimizers.clip_by_value)}
    vars(plugin).update(own)

    def undo() -> None:
        for name in own:
            vars(plugin).pop(name, None)

    return undo
