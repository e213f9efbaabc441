"""A user's script with a test function that trains, as the scripts of MindSpore's tutorials have.

RESULTS names the folder for what each rank found. FAILS is "early" or "late" where rank 1 is to fail.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import lightning as L
import torch

from tests.training.measured import LitLayers, measured_stages, point_loader
from tests.training.runs import QUIET, Losses


class Failing(LitLayers):
    """Fails on rank 1 in the second step."""

    def training_step(self, batch: object, batch_idx: int) -> object:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise MemoryError("no room")
        return super().training_step(batch, batch_idx)


def test_train() -> None:
    fails = os.environ.get("FAILS")
    if fails == "early" and "LOCAL_RANK" in os.environ:
        raise MemoryError("no room")
    torch.set_num_threads(1)
    L.seed_everything(1)
    losses = Losses()
    module = Failing() if fails == "late" else LitLayers()
    module.stage_config = measured_stages(2)
    trainer = L.Trainer(strategy="pipeline", devices=2, callbacks=[losses], **{**QUIET, "max_epochs": 1})
    trainer.fit(module, point_loader(24))
    found = {
        "stage": trainer.strategy.topology.stage_rank,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "folder": os.getcwd(),
        "losses": losses.values,
    }
    (Path(os.environ["RESULTS"]) / f"{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    test_train()
