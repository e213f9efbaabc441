"""A user's script in which something befalls the second rank. Arguments: the folder for results, and what."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_pipeline  # noqa: F401

BATCHES, EPOCHS = 2, 3


class Faulty(BoringModel):
    """Two layers on two stages, and a fault in the second epoch."""

    stage_config = {"head": 1}

    def __init__(self, fault: str, folder: Path) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2, 2)
        self.fault, self.folder = fault, folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.current_epoch == 1 and batch_idx == 1:
            self.meet()
        return self(batch).square().mean()

    def meet(self) -> None:
        note = self.folder / "fault"
        if self.fault == "none" or note.exists():  # in an earlier attempt
            return
        note.write_text(str(time.time()))
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "leave":
            os._exit(0)
        raise ValueError("the user's own error")


def fit(fault: str, folder: Path) -> dict[str, Any]:
    """Train, from the last checkpoint in the folder if there is one. Returns the weights on rank 0."""
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy="pipeline",
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        limit_train_batches=BATCHES,
        limit_val_batches=0,
        callbacks=ModelCheckpoint(folder, save_last=True),
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Faulty(fault, folder), ckpt_path="last")
    return trainer.strategy.lightning_module_state_dict()


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = Path(sys.argv[1])
    (results / f"{os.environ.get('LOCAL_RANK', 0)}.pid").write_text(str(os.getpid()))
    weights = fit(sys.argv[2], results)
    if weights:
        torch.save(weights, results / "weights.pt")
