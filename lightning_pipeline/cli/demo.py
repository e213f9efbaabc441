"""`lightning-pipeline demo`: trains a network that reads digits on CPU processes and in one, with equal losses."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_pipeline.cli.common import bare_table, wide_console
from lightning_pipeline.schedules import build, render

_MICROBATCHES = 8
_STEPS = 40
_BATCH = 64
_LAYERS = 8
_FONT = "75557 26227 71747 71717 55711 74717 74757 71122 75757 75717"
"""The digits, each as five rows of three dots: the bits of a number from 0 to 7."""
_GLYPHS = [[int(row) >> shift & 1 for row in digit for shift in (2, 1, 0)] for digit in _FONT.split()]
_IN_YOUR_PROJECT = """
In your own project, name the first module of each later stage, or nothing at all:

    Trainer(strategy="pipeline", devices={stages})  # the cut is found by measuring
    Trainer(strategy=PipelineStrategy(stage_config={{"layers.6": 1}}), devices=2)  # stage 1 begins with layers.6
"""


def demo(
    stages: Annotated[int, typer.Option(min=2, max=4, help="Stages, each on a process of its own.")] = 2,
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the report goes.")] = Path(
        "lightning-pipeline-demo"
    ),
) -> None:
    """Train a network that reads digits on several CPU processes, and in one: the losses are the same, bit for bit."""
    pipelined = _train(stages, folder)
    if pipelined is None:
        return  # this is another rank, which the first one has started with the same command
    alone = _train(1, None)
    assert alone is not None
    console = wide_console()
    table = bare_table(right=("step", f"loss on {stages} processes", "loss in one process"))
    for step in (*range(0, _STEPS, _STEPS // 4), _STEPS - 1):
        table.add_row(str(step + 1), repr(pipelined[step]), repr(alone[step]))
    console.print(table)
    equal = "the same bits" if pipelined == alone else "NOT the same; please report it"
    console.print(f"{_STEPS} losses: {equal}\n")
    console.print("What each process does in a step, time to the right:")
    console.print(render(build("1f1b", stages, _MICROBATCHES)), markup=False, highlight=False)
    console.print("\nWhat they did when, and why they waited; open it in a browser:")
    console.print(str((folder / "report.html").resolve()), markup=False, highlight=False, soft_wrap=True)
    console.print(_IN_YOUR_PROJECT.format(stages=stages), markup=False, highlight=False)


def _train(num_stages: int, folder: Path | None) -> list[float] | None:
    """The losses of a training run; None on ranks other than the first. The report goes into the folder."""
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_pipeline import PipelineStrategy, PipelineTimeline
    from lightning_pipeline._lightning import NAMES, LightningModule, Trainer

    warnings.simplefilter("ignore")
    for name in (NAMES.pytorch, NAMES.fabric):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Residual(nn.Module):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            convolutions = [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
            self.layers = nn.Sequential(nn.GroupNorm(4, width), nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1])

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layers(x)

    class Digits(LightningModule):
        """A small residual network."""

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 16, 3, padding=1)
            self.layers = nn.Sequential(*(Residual() for _ in range(_LAYERS)))
            self.head = nn.Linear(16 * 8 * 8, 10)
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, digits = batch
            loss = nn.functional.cross_entropy(self.head(self.layers(self.stem(images)).flatten(1)), digits)
            self.log("loss", loss, prog_bar=True)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(1)
    model = Digits()
    digits = torch.randint(10, (_STEPS * _BATCH,))
    data = TensorDataset(_drawn(digits), digits)
    cuts = {f"layers.{stage * _LAYERS // num_stages}": stage for stage in range(1, num_stages)}
    trainer = Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=PipelineStrategy(num_stages=num_stages, num_microbatches=_MICROBATCHES, stage_config=cuts),
        callbacks=[PipelineTimeline(folder, every_n_steps=_STEPS // 8)] if folder is not None else [],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=_BATCH))
    return model.losses if trainer.global_rank == 0 else None


def _drawn(digits: Any) -> Any:
    """Images of digits, [N] to [N, 1, 8, 8], each somewhere else and with noise."""
    import torch

    images = 0.2 * torch.randn(len(digits), 1, 8, 8)
    font = torch.tensor(_GLYPHS, dtype=torch.float).view(10, 1, 5, 3)
    rows, columns = torch.randint(4, (len(digits),)).tolist(), torch.randint(6, (len(digits),)).tolist()
    for image, digit, row, column in zip(images, digits.tolist(), rows, columns, strict=True):
        image[:, row : row + 5, column : column + 3] += font[digit]
    return images
