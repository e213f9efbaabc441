"""PipelineStrategy under Lightning's own loop, with all that it does between two steps; or the loop alone."""

import logging
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from contenders import LEARNING_RATE, Measured, Plan, intervals
from lightning_pipeline import PipelineStrategy
from workload import Workload


def train(workload: Workload, plan: Plan) -> Measured:
    """Train this rank's stages for ``plan.num_steps``, as a user would.

    Without a schedule, one process trains alone, and accumulates over the micro-batches.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    num_ranks = len(set(plan.placement))
    batch, each = workload.batch, 1
    pipeline: dict[str, Any] = {}
    if plan.schedule:
        strategy = PipelineStrategy(
            num_stages=num_ranks, num_microbatches=plan.num_microbatches, schedule=plan.schedule
        )
        pipeline = {"strategy": strategy, "devices": num_ranks * plan.num_replicas}
    else:
        each = plan.num_microbatches
        inputs, targets = batch
        batch = inputs[: len(inputs) // each], targets[: len(targets) // each]
        pipeline = {"devices": 1, "accumulate_grad_batches": each}
    clock = Clock(each)
    trainer = L.Trainer(
        accelerator="cpu",
        **pipeline,
        max_steps=plan.num_steps,
        max_epochs=-1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = Repeated(batch, plan.num_steps * each * plan.num_replicas)  # a sampler deals them to the replicas
    trainer.fit(LitWorkload(workload), DataLoader(batches, batch_size=None))
    return Measured(intervals(clock.starts), clock.loss)


class LitWorkload(L.LightningModule):
    """The workload as an ordinary module, its stages numbered along the data."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.layers = workload.layers
        self.loss = workload.loss
        self.stage_config = {f"layers.{cut}": stage for stage, cut in enumerate(workload.cuts, start=1)}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return self.loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


class Repeated(Dataset):
    """The same batch, time and again."""

    def __init__(self, batch: tuple[Tensor, Tensor], length: int) -> None:
        self.batch = batch
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.batch


class Clock(L.Callback):
    """Notes when each step starts and when the last one ends."""

    def __init__(self, batches_a_step: int) -> None:
        self.starts: list[float] = []
        self.loss = float("nan")
        self._batches_a_step = batches_a_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self._batches_a_step == 0:
            self.starts.append(time.perf_counter())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == trainer.max_steps:
            self.starts.append(time.perf_counter())
            self.loss = float(outputs["loss"])
