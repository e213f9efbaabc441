"""A project in the manner of lightning-hydra-template: everything is instantiated from a configuration, in which
`trainer.strategy` is overridden by a name, or by what to make it of."""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
import torch
from common import Case, main
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy

SIDE, CLASSES = 8, 10

CONFIG = """
seed: 7
data:
  _target_: hydra_project.DigitsDataModule
  train_val_test_split: [48, 16, 16]
  batch_size: 8
  num_workers: 0
model:
  _target_: hydra_project.DigitsLitModule
  optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01, weight_decay: 0.0}
  scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, mode: min, patience: 0}
  net: {_target_: hydra_project.SimpleDenseNet, lin1_size: 16, lin2_size: 24, lin3_size: 16}
  compile: false
callbacks:
  model_checkpoint:
    _target_: lightning.pytorch.callbacks.ModelCheckpoint
    dirpath: ${trainer.default_root_dir}/checkpoints
    filename: epoch_{epoch:03d}
    monitor: val/acc
    mode: max
    save_last: true
    auto_insert_metric_name: false
  early_stopping: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/acc, patience: 2, mode: max}
  model_summary: {_target_: lightning.pytorch.callbacks.RichModelSummary, max_depth: -1}
  rich_progress_bar: {_target_: lightning.pytorch.callbacks.RichProgressBar}
trainer:
  _target_: lightning.pytorch.trainer.Trainer
  default_root_dir: ???
  min_epochs: 1
  max_epochs: 4
  accelerator: cpu
  devices: 1
  check_val_every_n_epoch: 1
  deterministic: false
"""


class DigitsDataModule(LightningDataModule):
    def __init__(self, train_val_test_split: tuple[int, int, int], batch_size: int, num_workers: int) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.parts: list[Dataset] = []
        self.batch_size_per_device = batch_size

    def setup(self, stage: str | None = None) -> None:
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError(f"{self.hparams.batch_size} samples are not divisible by {self.trainer.world_size}")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.parts:
            drawn = torch.Generator().manual_seed(0)
            lengths = self.hparams.train_val_test_split
            halves = [
                TensorDataset(
                    torch.rand(sum(lengths) // 2, 1, SIDE, SIDE, generator=drawn),
                    torch.randint(0, CLASSES, (sum(lengths) // 2,), generator=drawn),
                )
                for _ in range(2)
            ]
            generator = torch.Generator().manual_seed(42)
            self.parts = [*random_split(ConcatDataset(halves), lengths, generator=generator)]

    def _loader(self, number: int, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            self.parts[number],
            batch_size=self.batch_size_per_device,
            num_workers=self.hparams.num_workers,
            shuffle=shuffle,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(2)


class SimpleDenseNet(nn.Module):
    def __init__(self, lin1_size: int, lin2_size: int, lin3_size: int) -> None:
        super().__init__()
        sizes = [SIDE * SIDE, lin1_size, lin2_size, lin3_size]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(lin3_size, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.view(x.size(0), -1))


class DigitsLitModule(LightningModule):
    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any, compile: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.val_acc, self.test_acc = (
            Accuracy(task="multiclass", num_classes=CLASSES) for _ in range(3)
        )
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.test_loss(loss)
        self.test_acc(preds, targets)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is None:
            return {"optimizer": optimizer}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": self.hparams.scheduler(optimizer=optimizer),
                "monitor": "val/loss",
                "interval": "epoch",
                "frequency": 1,
            },
        }


def composed(folder: Path, overrides: list[str]) -> DictConfig:
    """What `python train.py OVERRIDE...` works with."""
    folder.mkdir(parents=True)
    (folder / "train.yaml").write_text(CONFIG)
    with hydra.initialize_config_dir(str(folder.resolve()), version_base="1.3"):
        return hydra.compose("train", overrides=overrides)


def train(trainer_kwargs: dict[str, Any], *, as_target: bool = False) -> Any:
    strategy, watcher = trainer_kwargs["strategy"], trainer_kwargs["callbacks"]
    if as_target and isinstance(strategy, dict):
        items = ", ".join(f"{name}: {_written(value)}" for name, value in strategy.items())
        strategy = f"{{{items}}}"
    config = composed(
        Path(trainer_kwargs["default_root_dir"]) / f"config{os.environ.get('LOCAL_RANK', '0')}",
        [
            f"trainer.default_root_dir={trainer_kwargs['default_root_dir']}",
            f"+trainer.strategy={strategy}",
            f"trainer.devices={trainer_kwargs['devices']}",
        ],
    )
    datamodule = hydra.utils.instantiate(config.data)
    model = hydra.utils.instantiate(config.model)
    callbacks = [hydra.utils.instantiate(one) for one in config.callbacks.values()]
    options = {"callbacks": [*callbacks, *watcher], "logger": trainer_kwargs["logger"], "log_every_n_steps": 1}
    trainer = hydra.utils.instantiate(config.trainer, **options)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for logger in trainer.loggers:
        model_config = OmegaConf.to_container(config.model, resolve=True)
        logger.log_hyperparams({"model": model_config, "model/params/total": num_parameters})
    trainer.fit(model=model, datamodule=datamodule)
    trained = dict(trainer.callback_metrics)
    best = trainer.checkpoint_callback.best_model_path
    # The file holds what makes the optimizer, which is no plain data.
    trainer.test(model=model, datamodule=datamodule, ckpt_path=best, weights_only=False)
    tested = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    return {"best": Path(best).name, "trained": trained, "tested": tested, "parameters": num_parameters}


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_written(one)}' for name, one in value.items())}}}"
    return str(value)


if __name__ == "__main__":
    sys.modules["hydra_project"] = sys.modules["__main__"]  # by which the configuration names what is here
    key = {"net.model.6": 1}
    main(
        {
            "strategy by name": Case(train, key=key, by_name=True),
            "strategy as _target_": Case(partial(train, as_target=True), key=key, as_target=True),
        },
        "lightning.pytorch",
    )
