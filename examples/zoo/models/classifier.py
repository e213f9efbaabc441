"""An image classifier: cross entropy and accuracy over any network."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics.classification import MulticlassAccuracy


class LitClassifier(L.LightningModule):
    """Trains ``net``, which maps images (N, C, H, W) to logits (N, num_classes).

    ``optimizer`` and ``scheduler`` are called with the parameters and with the optimizer; the scheduler steps once an
    epoch. ``stage_config`` says where a pipeline cuts the module, and plain Lightning does not look at it.
    """

    def __init__(
        self,
        *,
        net: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        num_classes: int = 10,
        stage_config: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.stage_config = stage_config
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_acc(logits, labels)
        self.log("val/loss", F.cross_entropy(logits, labels))
        self.log("val/acc", self.val_acc, prog_bar=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return torch.argmax(self(batch[0]), dim=1)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return optimizer if self.scheduler is None else ([optimizer], [self.scheduler(optimizer)])
