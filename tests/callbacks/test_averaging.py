"""Callbacks that keep a copy of the model: the averages of two stages are those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from tests.launching import launch

pytestmark = pytest.mark.multiprocess


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.second = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.second(self.first(batch)), batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(num_stages: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    """The metrics under each callback; checkpoints go to the folder."""
    averages = {
        "ema": EMAWeightAveraging(decay=0.9),
        "swa": StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=2),
    }
    metrics = {}
    for name, callback in averages.items():
        L.seed_everything(1, verbose=False)
        data = DataLoader(torch.randn(32, 8), batch_size=16)
        trainer = L.Trainer(
            strategy=PipelineStrategy(stage_config={"second": 1}, num_stages=num_stages, num_microbatches=4),
            accelerator="cpu",
            devices=num_stages,
            max_epochs=3,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Lit()
        trainer.fit(module, data, data)
        trainer.save_checkpoint(folder / f"{name}-{num_stages}.ckpt")
        metrics[name] = dict(trainer.callback_metrics)
    return metrics


def test_averages_do_not_depend_on_the_number_of_stages(tmp_path: Path) -> None:
    [expected] = launch(fit, 1, tmp_path, world=1)
    assert launch(fit, 2, tmp_path, world=2) == [expected, expected]
    for name in ("ema", "swa"):
        one, two = (torch.load(tmp_path / f"{name}-{n}.ckpt", weights_only=True)["state_dict"] for n in (1, 2))
        assert one.keys() == two.keys()
        for key in one:
            assert torch.equal(one[key], two[key]), f"{name}: {key}"
