"""The contenders: each trains a workload for some steps and reports how long every step took."""

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, Dataset

from lightning_pipeline import PipelineStrategy
from workload import Workload

LEARNING_RATE = 0.01
TORCH_SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass
class Measured:
    """Seconds from the start of a step to the start of the next, and the last step's loss (on the last stage)."""

    seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")


def single(workload: Workload, *, num_microbatches: int, num_steps: int) -> Measured:
    """One process without a pipeline, which accumulates over the micro-batches."""
    optimizer = torch.optim.SGD(workload.layers.parameters(), lr=LEARNING_RATE)
    inputs, targets = (part.chunk(num_microbatches) for part in workload.batch)
    measured, starts = Measured(), [time.perf_counter()]
    for _ in range(num_steps):
        total = 0.0
        for x, y in zip(inputs, targets, strict=True):
            loss = workload.loss(workload.layers(x), y) / num_microbatches
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        measured.loss = total
        starts.append(time.perf_counter())
    measured.seconds = intervals(starts)
    return measured


def torch_pipelining(workload: Workload, schedule: str, *, num_microbatches: int, num_steps: int) -> Measured:
    """torch.distributed.pipelining, one stage a rank."""
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    module = workload.part(rank)
    stage = PipelineStage(module, rank, num_stages, torch.device("cpu"))
    pipeline = TORCH_SCHEDULES[schedule](stage, num_microbatches, loss_fn=workload.loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    inputs, targets = workload.batch
    measured, starts = Measured(), [time.perf_counter()]
    for _ in range(num_steps):
        losses: list[Tensor] = []
        args = (inputs,) if rank == 0 else ()
        kwargs = {"target": targets, "losses": losses} if rank == num_stages - 1 else {}
        pipeline.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            measured.loss = float(torch.stack(losses).mean())
        starts.append(time.perf_counter())
    measured.seconds = intervals(starts)
    return measured


def ours(workload: Workload, schedule: str, *, num_microbatches: int, num_steps: int) -> Measured:
    """PipelineStrategy under Lightning's own loop, with all that the loop does between two steps."""
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=PipelineStrategy(num_microbatches=num_microbatches, schedule=schedule),
        max_steps=num_steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitWorkload(workload), DataLoader(Repeated(workload.batch, num_steps), batch_size=None))
    return Measured(intervals(clock.starts), clock.loss)


class LitWorkload(L.LightningModule):
    """The workload as an ordinary module."""

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

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.loss = float("nan")

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == trainer.max_steps:
            self.starts.append(time.perf_counter())
            self.loss = float(outputs["loss"])


def intervals(times: list[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(times)]
