"""A module that has been trained goes on in other Trainers, although each rank holds only its stage by then."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S, launch

pytestmark = pytest.mark.multiprocess


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.second(self.first(batch)), batch)
        self.log("loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self.second(self.first(batch)), batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_test_fit(num_stages: int) -> list[dict[str, Any]]:
    def trainer() -> L.Trainer:
        return L.Trainer(
            strategy=PipelineStrategy(stage_config={"second": 1}, num_stages=num_stages, num_microbatches=4),
            accelerator="cpu",
            devices=num_stages,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    L.seed_everything(1, verbose=False)
    data = DataLoader(torch.randn(32, 8), batch_size=8)
    module = Lit()
    values = []
    for name in ("fit", "test", "fit", "test"):
        current = trainer()
        getattr(current, name)(module, data)
        values.append(dict(current.callback_metrics))
    other = trainer()
    other.fit(Lit(), data)
    values.append(dict(other.callback_metrics))
    return values


def test_a_module_goes_from_trainer_to_trainer() -> None:
    [expected] = launch(fit_test_fit, 1, world=1)
    assert expected[0]["loss"] > expected[2]["loss"]
    assert launch(fit_test_fit, 2, world=2) == [expected, expected]


class SlowToEnd(L.Callback):
    """The first stage's rank needs longer than the others for the end of the epoch, before it asks for the metric."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            time.sleep(1.5)


class LitMetric(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.second(self.first(batch))
        self.error(output, batch)
        self.log("error", self.error, on_epoch=True, on_step=False)
        return nn.functional.mse_loss(output, batch)


def fit_with_a_slow_rank() -> None:
    trainer = L.Trainer(
        strategy=PipelineStrategy(stage_config={"second": 1}, num_microbatches=4),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[SlowToEnd()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitMetric(), DataLoader(torch.randn(32, 8), batch_size=8))


def test_no_rank_ends_before_the_others_have_what_it_sent() -> None:
    launch(fit_with_a_slow_rank, world=2)


class FailsOnce(L.Callback):
    """On one rank, after two batches. Keeps the losses."""

    def __init__(self) -> None:
        self.has_failed = False
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if not self.has_failed and trainer.global_step == 2:
            self.has_failed = True
            trainer.strategy.barrier()
            if trainer.global_rank == 1:
                raise RuntimeError("the user's own error")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def fit_again_after_an_error() -> list[list[float]]:
    """By a Trainer of its own, and by the same."""
    found = []
    for is_same in (False, True):
        L.seed_everything(1, verbose=False)
        module, callback = Lit(), FailsOnce()

        def trainer() -> L.Trainer:
            return L.Trainer(
                strategy=PipelineStrategy(stage_config={"second": 1}, num_microbatches=4, timeout=PATIENCE_S),
                accelerator="cpu",
                devices=2,
                max_steps=4,
                callbacks=[callback],  # noqa: B023 - called within the turn
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )

        data = DataLoader(torch.randn(64, 8), batch_size=8)
        first = trainer()
        with pytest.raises(RuntimeError, match="the user's own error"):
            first.fit(module, data)
        (first if is_same else trainer()).fit(module, data)
        found.append(callback.losses)
    return found


def test_a_run_that_failed_is_no_hindrance_to_the_next() -> None:
    ranks = launch(fit_again_after_an_error, world=2)
    assert ranks[0][0] == ranks[1][0] and ranks[0][1] == ranks[1][1]
    by_another, by_the_same = ranks[1]
    assert len(by_another) == 2 + 4 and by_the_same == by_another[:4]  # whose steps go on where they were
