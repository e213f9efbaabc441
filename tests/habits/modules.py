"""What habits are built from: a few little layers, written as tutorials write them."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = int(os.environ.get("HABITS_WIDTH", "8"))
CLASSES = int(os.environ.get("HABITS_CLASSES", "4"))
SAMPLES = int(os.environ.get("HABITS_SAMPLES", "8"))
"""Of a batch, which is split into 4 micro-batches. For the environment's, see ``python -m tests.habits --help``."""


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Normed(Layer):
    """A layer behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Layers(L.LightningModule):
    """Four layers and a head that classify vectors."""

    depth = 4
    width = WIDTH
    layer: Any = Layer
    on_last_stage: tuple[str, ...] = ()
    """Names of modules that need a key, as the data is not always on the last stage when they are called."""
    beside: dict[str, str] = {}
    """Names of modules, and of those that they share a stage with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layer() for _ in range(self.depth)])
        self.head = nn.Linear(self.width, CLASSES)

    def chain(self) -> list[str]:
        """Names of modules in the order of the data, between which the stages may begin."""
        return [f"layers.{i}" for i in range(len(self.layers))]

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        """One batch of data."""
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Noting(Layers):
    """Notes what its steps or hooks find."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []


class Evaluated(Layers):
    """With validation, test and prediction."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(-1) == y).float().mean(), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])
