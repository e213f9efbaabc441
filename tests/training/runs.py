"""What the runs of these tests have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.engine.slices import local_part
from lightning_pipeline.partition.placeholder import is_absent
from lightning_pipeline.planning import calibration, timing
from lightning_pipeline.strategy import partitioner, trials
from tests.launching import PATIENCE_S

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


class Present(Callback):
    """Notes what this rank holds when training ends, as afterwards it has all again."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        held = {name: p for name, p in pl_module.named_parameters() if not is_absent(p)}
        self.names = sorted(held)
        self.numel = sum(local_part(parameter).numel() for parameter in held.values())
        with trainer.strategy.aside():
            states = trainer.optimizers[0].state.values() if trainer.optimizers else ()
            self.numel_of_states = sum(
                local_part(value).numel() for state in states for value in state.values() if isinstance(value, Tensor)
            )


def pipeline_trainer(
    stage_config: dict[str, int], *, world: int, strategy: dict[str, Any] | None = None, **options: Any
) -> L.Trainer:
    """A quiet Trainer whose stages are the processes of this launch."""
    arguments = {"num_microbatches": NUM_MICROBATCHES, "timeout": PATIENCE_S, **(strategy or {})}
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


@contextmanager
def measured_shortly() -> Iterator[None]:
    """While entered, an automatic cut is made of few measurements: enough to show how, not to find the best one."""
    fewer = {
        (timing, "MAX_RUNS"): 4,
        (timing, "MIN_RUNS"): 2,
        (calibration, "_TIMES"): 1,
        (calibration, "_LINK_TIMES"): (4, 2),
        (trials, "_MAX_STEPS"): 3,
        (partitioner, "MOST"): 2,
        (partitioner, "EFFORT"): 1e4,
    }
    with ExitStack() as patches:
        for (module, name), value in fewer.items():
            patches.enter_context(mock.patch.object(module, name, value))
        yield
