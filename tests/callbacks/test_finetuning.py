"""A finetuning callback, which adds a group of parameters to the optimizer half-way."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning

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


def test_the_new_group_is_trained_on_all_stages() -> None:
    [plain] = launch(train, 0, world=1)
    [one] = launch(train, 1, world=1)
    first, second = launch(train, 2, world=2)
    assert first["losses"] == second["losses"] == one["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert differing(one["weights"], first["weights"]) == {}
    assert first["sizes"] == plain["sizes"] == [5, 24]
