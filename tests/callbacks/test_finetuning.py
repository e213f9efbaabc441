"""A finetuning callback, which adds a group of parameters to the optimizer half-way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.launching import launch
from tests.training.models import LitTokens, gpt_stages, token_loader
from tests.training.runs import Losses, differing, pipeline_trainer, plain_trainer, weights

pytestmark = pytest.mark.multiprocess


class Unfreeze(BaseFinetuning):
    """Trains all blocks from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=1e-3)


class LitFrozen(LitTokens):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def train(world: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    losses = Losses()
    options: dict[str, Any] = {"callbacks": [losses, Unfreeze()], "max_epochs": 2, "gradient_clip_val": 0.5}
    trainer = pipeline_trainer(gpt_stages(world), world=world, **options) if world else plain_trainer(**options)
    trainer.fit(LitFrozen(), token_loader(16, 8))
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])
    sizes = [len(group["params"]) for group in state["param_groups"]] if trainer.global_rank == 0 else None
    return {"losses": losses.values, "weights": weights(trainer), "sizes": sizes}


class LitBackbone(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])]


def goes_on(world: int, folder: Path) -> dict[str, Any]:
    """Lightning's own callback, and a run that goes on after it has added a group."""
    L.seed_everything(2, verbose=False)
    data = TensorDataset(torch.randn(32, 8), torch.arange(32) % 3)
    path = folder / f"{world}.ckpt"
    found: dict[str, Any] = {"losses": []}
    for max_epochs in (3, 5):
        losses = Losses()
        callback = BackboneFinetuning(2, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1)
        options: dict[str, Any] = {"callbacks": [losses, callback], "max_epochs": max_epochs}
        cut = {"backbone.2": 1} if world > 1 else {}
        trainer = pipeline_trainer(cut, world=world, **options) if world else plain_trainer(**options)
        trainer.fit(LitBackbone(), DataLoader(data, 8), ckpt_path=path if max_epochs == 5 else None)
        trainer.save_checkpoint(path)
        found["losses"] += losses.values
    return {**found, "weights": weights(trainer)}


def test_a_run_goes_on_with_the_groups_that_were_added(tmp_path: Path) -> None:
    [plain], [one] = (launch(goes_on, world, tmp_path, world=1) for world in (0, 1))
    first, second = launch(goes_on, 2, tmp_path, world=2)
    assert len(one["losses"]) == 20
    assert first["losses"] == second["losses"] == one["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert differing(one["weights"], first["weights"]) == {}


@pytest.mark.slow
def test_the_new_group_is_trained_on_all_stages() -> None:
    [plain] = launch(train, 0, world=1)
    [one] = launch(train, 1, world=1)
    first, second = launch(train, 2, world=2)
    assert first["losses"] == second["losses"] == one["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert differing(one["weights"], first["weights"]) == {}
    assert first["sizes"] == plain["sizes"] == [5, 24]
