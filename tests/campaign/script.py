"""The user's script of a trial: a small model that is trained, saved and resumed, with a fault on one rank.

The environment variable CAMPAIGN_TRIAL has what is to be done, as JSON (see `tests.campaign.trials.Trial`), and
CAMPAIGN_FOLDER the trial's folder: each rank writes its log there, its process id, and the phases that it comes to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # first of all, so that nothing is said elsewhere
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    trial_folder = Path(os.environ["CAMPAIGN_FOLDER"])
    log = os.open(trial_folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)

from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_pipeline
from tests.campaign.sabotage import Saboteur
from tests.training.runs import QUIET, measured_shortly

EPOCHS, BATCHES, BATCH, WIDTH, LAYERS = 5, 2, 8, 48, 4
SEED = 5

MODULE_HOOKS = (
    *("setup", "configure_model", "on_fit_start", "configure_optimizers", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "training_step", "forward", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "validation_step"),
    *("on_validation_epoch_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end", "on_fit_end", "teardown"),
)
CALLBACK_HOOKS = (
    *("setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_batch_start", "on_train_batch_end"),
    *("on_validation_batch_end", "on_validation_end", "state_dict", "on_save_checkpoint", "on_train_end", "on_fit_end"),
    "teardown",
)
DATA_HOOKS = ("prepare_data", "setup", "train_dataloader", "val_dataloader", "teardown")


class Points(Dataset):
    """As many batches of training or validation as an epoch has."""

    def __init__(self, saboteur: Saboteur, kind: str) -> None:
        self.saboteur = saboteur
        self.kind = kind
        self.points = torch.randn(BATCHES * BATCH, WIDTH, generator=torch.Generator().manual_seed(len(kind)))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        self.saboteur.at("data", "__getitem__")
        return self.points[index]


class Data(L.LightningDataModule):
    """Loaders, with a worker process if the trial says so."""

    def __init__(self, saboteur: Saboteur, workers: int) -> None:
        super().__init__()
        self.saboteur = saboteur
        self.options = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Points(self.saboteur, "training"), **self.options)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points(self.saboteur, "validation"), **self.options)


class Lit(L.LightningModule):
    """Layers with dropout, whose checkpoint has some hundred kilobytes."""

    def __init__(self, saboteur: Saboteur, width: int = WIDTH, optimizer: str = "Adam") -> None:
        super().__init__()
        self.saboteur = saboteur
        self.optimizer = optimizer
        hidden = [width] * LAYERS
        sizes = zip([WIDTH, *hidden], [*hidden, WIDTH], strict=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(*size), nn.Tanh(), nn.Dropout(0.1)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch), batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch), batch))

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01)


class Phases(Callback):
    """Notes the phases of a run as it comes to them."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.saboteur = saboteur

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.saboteur.note("set-up")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.saboteur.allocate()
        self.saboteur.note("first step" if trainer.global_step == 0 else "steady" if trainer.current_epoch else "")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.saboteur.note("validation" if trainer.current_epoch else "")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.saboteur.note("saving" if trainer.current_epoch else "")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.saboteur.note("shutdown")


def train(trial: dict[str, Any], folder: Path, *, is_saboteur: bool = True) -> dict[str, Tensor]:
    """What the trial trains, from its last checkpoint on. Returns the weights on rank 0."""
    saboteur = Saboteur(trial if is_saboteur else {**trial, "kind": "none"}, folder)
    for label, kind, hooks in (("module", Lit, MODULE_HOOKS), ("callback", Phases, CALLBACK_HOOKS)):
        saboteur.wrap(kind, label, hooks)
    saboteur.wrap(Data, "data", DATA_HOOKS)
    other = trial["other"] if saboteur.is_victim and trial["kind"] == "unequal" and is_saboteur else {}
    L.seed_everything(other.get("seed", SEED), verbose=False)
    stages = trial["stages"]
    config = {f"layers.{1 + stage * LAYERS // stages}": stage for stage in range(1, stages)}
    strategy = lightning_pipeline.PipelineStrategy(
        stage_config="auto" if trial["is_auto"] else config,
        num_stages=stages,
        num_microbatches=other.get("num_microbatches", 4),
        schedule=other.get("schedule", "1f1b"),
        save_distributed_checkpoint=trial["is_folder"],
        timeout=other.get("timeout", trial["timeout"]),
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=trial["world"],
        callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True), Phases(saboteur)],
        **{
            **QUIET,
            "enable_checkpointing": True,
            "max_epochs": other.get("max_epochs", trial["epochs"]),
            "limit_train_batches": other.get("limit_train_batches", 1.0),
            "num_sanity_val_steps": 1,
        },
    )
    module = Lit(saboteur, other.get("width", WIDTH), other.get("optimizer", "Adam"))
    with measured_shortly() if trial["is_auto"] else nullcontext():
        trainer.fit(module, datamodule=Data(saboteur, trial["workers"]), ckpt_path="last")
    whole = trainer.strategy.gather_module()
    saboteur.note("end")
    return dict(whole.state_dict()) if whole is not None else {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(os.environ["CAMPAIGN_TRIAL"])
    weights = train(given, trial_folder)
    if weights:
        torch.save(weights, trial_folder / "weights.pt")
    sys.stdout.flush()
