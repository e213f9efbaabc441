"""What the runs of these tests have in common."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pipeline import PipelineStrategy

NUM_MICROBATCHES = 4
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Losses(Callback):
    """Keeps the loss of each training batch, as callbacks see it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]))


def pipeline_trainer(
    stage_config: dict[str, int], *, world: int, strategy: dict[str, Any] | None = None, **options: Any
) -> L.Trainer:
    """A quiet Trainer whose stages are the processes of this launch."""
    arguments = {"num_microbatches": NUM_MICROBATCHES, "timeout": 30, **(strategy or {})}
    return L.Trainer(
        strategy=PipelineStrategy(stage_config=stage_config, num_stages=world, **arguments),
        devices=world,
        **{**QUIET, **options},
    )


def plain_trainer(**options: Any) -> L.Trainer:
    """A quiet Trainer on one device, without the pipeline."""
    return L.Trainer(strategy="auto", devices=1, **{**QUIET, **options})


def weights(trainer: L.Trainer) -> dict[str, Tensor]:
    """The whole model's weights on rank 0, {} elsewhere. Every rank must call it."""
    return {name: tensor.clone() for name, tensor in trainer.strategy.lightning_module_state_dict().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Names of tensors whose bits differ, each with the largest difference."""
    assert one.keys() == other.keys()
    return {
        name: float((one[name].double() - other[name].double()).abs().max())
        for name in one
        if not torch.equal(one[name], other[name])
    }
