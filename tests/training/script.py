"""A user's training script. Arguments: the folder for results, and the module."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_pipeline  # noqa: F401

FOLDER = Path(sys.argv[1])


class Split(BoringModel):
    """Two layers on two stages."""

    stage_config = {"head": 1}

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss


class Misnamed(Split):
    """Begins a stage with a module that it does not have."""

    stage_config = {"tail": 1}


if __name__ == "__main__":
    torch.set_num_threads(1)
    (FOLDER / f"{os.environ.get('LOCAL_RANK', 0)}.pid").write_text(str(os.getpid()))
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy="pipeline",
        accelerator="cpu",
        devices=2,
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit({"Split": Split, "Misnamed": Misnamed}[sys.argv[2]]())
    result = {"loss": float(trainer.callback_metrics["loss"]), "stage": trainer.strategy.topology.stage_rank}
    (FOLDER / f"{trainer.global_rank}.json").write_text(json.dumps(result))
