"""One of the processes of ``overlap.py``; each writes what it measured into a file of its own."""

import json
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineGradReducer, PipelineStrategy, PipelineTimeline
from lightning_pipeline.schedules import default_virtual_stages, placement_of
from with_lightning import LitWorkload, Repeated
from workload import Workload, gpt

NUM_WARMUP = 4
"""Steps that are not counted: shapes are learnt and buffers made in them."""

READY = PipelineGradReducer.ready


class Wait(torch.autograd.Function):
    """Gives back its input after some seconds; its backward takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class WaitingLinear(nn.Linear):
    """A layer that takes its time without taking this machine's cores, as if a device computed it."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(super().forward(x), self.seconds)


def waiting(*, num_stages: int, batch_size: int, width: int, num_layers: int, seconds: float) -> Workload:
    """A chain of layers that wait, as many on every stage."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(WaitingLinear(width, seconds) for _ in range(num_layers)))
    cuts = [num_layers * stage // num_stages for stage in range(1, num_stages)]
    return Workload(layers, cuts, F.mse_loss, (torch.rand(batch_size, width), torch.rand(batch_size, width)))


class TakeTurns(L.Callback):
    """Lets gradients travel while backwards run in every other step only, and notes what each step took on this rank.

    Its place is before PipelineTimeline, whose exchange of messages at the end of a step does not count; after that
    exchange all ranks begin the next step together.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._note_share(trainer)
        overlaps = batch_idx % 2 == 1
        PipelineGradReducer.ready = READY if overlaps else leave_to_finish  # type: ignore[method-assign, assignment]
        self.steps.append({"overlaps": overlaps})
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps[-1]["seconds"] = time.perf_counter() - self._start

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note_share(trainer)

    def _note_share(self, trainer: L.Trainer) -> None:
        """PipelineTimeline has logged it since the last step."""
        if self.steps:
            self.steps[-1]["share"] = float(trainer.callback_metrics["pipeline/reduction_overlap"])


def leave_to_finish(reducer: PipelineGradReducer, parameters: Iterable[nn.Parameter]) -> None:
    """In the place of `PipelineGradReducer.ready`: no bucket starts before the schedule is over."""


def main(schedule: str, settings: dict[str, Any], folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    num_stages, num_microbatches = settings["num_stages"], settings["num_microbatches"]
    sizes = {
        "num_stages": len(placement_of(schedule, num_stages, default_virtual_stages(schedule))),
        "batch_size": num_microbatches,
        "width": settings["width"],
    }
    if settings["layer_ms"]:
        workload = waiting(**sizes, num_layers=settings["num_layers"], seconds=settings["layer_ms"] / 1e3)
    else:
        workload = gpt(**sizes, num_blocks=settings["num_layers"])
    num_steps = NUM_WARMUP + 2 * settings["num_steps"]
    turns = TakeTurns()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages * settings["num_replicas"],
        strategy=PipelineStrategy(num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule),
        max_steps=num_steps,
        callbacks=[turns, PipelineTimeline(folder, schedule, every_n_steps=1)],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitWorkload(workload), DataLoader(Repeated(workload.batch, num_steps), batch_size=None))
    (folder / f"{schedule}-{trainer.global_rank}.json").write_text(json.dumps(turns.steps[NUM_WARMUP:]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
