"""A classifier, and one that logs in all the ways there are."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

NUM_CLASSES = 3
WIDTH = 8
NUM_LAYERS = 4


class LitLayers(L.LightningModule):
    """A classifier of four layers and a head.

    Args:
        scheduler: "plateau" (on val_loss, each epoch), "one_cycle" (each step) or None.
    """

    def __init__(self, *, scheduler: str | None = None, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scheduler = scheduler
        self.lr = lr
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "logits": logits}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.log("test_loss", F.cross_entropy(logits, y))
        return {"logits": logits, "count": len(x)}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.scheduler == "one_cycle":
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=40)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        return optimizer


class LitMeasured(LitLayers):
    """With values and metrics that are logged in all the ways there are, from every step and from hooks."""

    def __init__(self, *, scheduler: str | None = None, lr: float = 0.05) -> None:
        super().__init__(scheduler=scheduler, lr=lr)
        self.train_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_recall = MulticlassRecall(NUM_CLASSES)
        self.mean_loss = MeanMetric()
        self.mean_hidden = MeanMetric()
        self.scores = MetricCollection(
            {"precision": MulticlassPrecision(NUM_CLASSES), "recall": MulticlassRecall(NUM_CLASSES)}, prefix="val_"
        )

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + layer(x)
            if self.training:
                self.log(f"hidden/{index}", x.detach().abs().mean(), on_step=False, on_epoch=True)
                if index == 0:
                    self.mean_hidden.update(x.detach())
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("batch_idx", float(batch_idx), on_step=True, on_epoch=True)
        self.log("mean_hidden", self.mean_hidden, on_step=False, on_epoch=True)
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("largest", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("sum_of_x", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("own_batch_size", loss, on_epoch=True, batch_size=2 * len(x))
        self.log_dict({"logits/mean": logits.mean(), "logits/std": logits.std()}, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("val_loss", loss, prog_bar=True)
        self.val_accuracy(logits, y)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)
        self.val_recall.update(logits, y)
        self.mean_loss.update(loss, weight=len(x))
        self.scores.update(logits, y)
        self.log_dict(self.scores)

    def on_validation_epoch_end(self) -> None:
        self.log("val_recall_by_hand", self.val_recall.compute())
        self.val_recall.reset()
        self.log("mean_loss", self.mean_loss.compute())
        self.mean_loss.reset()


def measured_stages(num_stages: int) -> dict[str, int]:
    """The stage_config that cuts `LitMeasured` into stages of equally many layers."""
    return {f"layers.{stage * NUM_LAYERS // num_stages}": stage for stage in range(1, num_stages)}


def points(num_samples: int, seed: int = 0) -> TensorDataset:
    """Points [num_samples, WIDTH] and labels [num_samples], which follow from the points but for some noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    noise = torch.randn(num_samples, NUM_CLASSES, generator=generator)
    return TensorDataset(x, (x[:, :NUM_CLASSES] + noise).argmax(1))


def point_loader(num_samples: int, batch_size: int = 8, *, seed: int = 0, shuffle: bool = False) -> DataLoader:
    return DataLoader(points(num_samples, seed), batch_size=batch_size, shuffle=shuffle)
