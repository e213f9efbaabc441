"""`lightning-pipeline demo`: trains a small model on two CPU processes and in one, and compares the losses."""

from __future__ import annotations

import logging
import warnings
from typing import Annotated, Any

import typer

from lightning_pipeline.cli.common import bare_table, wide_console
from lightning_pipeline.schedules import build, render

_MICROBATCHES = 8
_STEPS = 40
_IN_YOUR_PROJECT = """
In your own project, name the first module of each later stage, or nothing at all:

    Trainer(strategy="pipeline", devices={stages})  # the cut is found by measuring
    Trainer(strategy=PipelineStrategy(stage_config={{"layers.6": 1}}), devices=2)  # stage 1 begins with layers.6
"""


def demo(
    stages: Annotated[int, typer.Option(min=2, max=4, help="Stages, each on a process of its own.")] = 2,
) -> None:
    """Train a small network on several CPU processes, and in one process: the losses are the same, bit for bit."""
    pipelined = _train(stages)
    if pipelined is None:
        return  # this is another rank, which the first one has started with the same command
    alone = _train(1)
    assert alone is not None
    console = wide_console()
    table = bare_table(right=("step", f"loss on {stages} processes", "loss in one process"))
    for step in (*range(0, _STEPS, _STEPS // 4), _STEPS - 1):
        table.add_row(str(step + 1), repr(pipelined[step]), repr(alone[step]))
    console.print(table)
    equal = "the same bits" if pipelined == alone else "NOT the same; please report it"
    console.print(f"{_STEPS} losses: {equal}\n")
    console.print("What each process did in a step, time to the right:")
    console.print(render(build("1f1b", stages, _MICROBATCHES)), markup=False, highlight=False)
    console.print(_IN_YOUR_PROJECT.format(stages=stages), markup=False, highlight=False)


def _train(num_stages: int) -> list[float] | None:
    """The losses of a training run; None on ranks other than the first."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_pipeline import PipelineStrategy
    from lightning_pipeline._lightning import NAMES, LightningModule, Trainer

    warnings.simplefilter("ignore")
    for name in (NAMES.pytorch, NAMES.fabric):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Spirals(LightningModule):
        """Classifies points by the arm of a spiral that they lie on."""

        def __init__(self) -> None:
            super().__init__()
            hidden = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
            self.layers = torch.nn.Sequential(torch.nn.Linear(2, 64), *hidden, torch.nn.Linear(64, 3))
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            points, arms = batch
            loss = torch.nn.functional.cross_entropy(self.layers(points), arms)
            self.log("loss", loss, prog_bar=True)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(1)
    arms = torch.randint(3, (_STEPS * 32,))
    radius = torch.rand(len(arms))
    angle = 4 * radius + arms * 2.1 + 0.1 * torch.randn(len(arms))
    points = torch.stack([radius * angle.sin(), radius * angle.cos()], 1)
    layers = 8
    cuts = {f"layers.{stage * layers // num_stages}": stage for stage in range(1, num_stages)}
    model = Spirals()
    trainer = Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=PipelineStrategy(num_stages=num_stages, num_microbatches=_MICROBATCHES, stage_config=cuts),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(points, arms), batch_size=32))
    return model.losses if trainer.global_rank == 0 else None
