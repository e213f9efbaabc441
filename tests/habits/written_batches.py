"""Batches into which a step writes, and which hooks, later epochs or later steps look at."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Evaluated, Noting
from tests.habits.table import habit


class LooksAtBatch(Noting):
    """A hook notes what the step has left of its batch. The harness gives the same batches in each epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(batch[0].sum().item())


@habit(plain=False, shows=False, observed=("found",))
class BatchScaled(LooksAtBatch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(0.9)
        return super().training_step(batch, batch_idx)


@habit(plain=False, shows=False, observed=("found",))
class BatchPlusLateValue(LooksAtBatch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        late = self.features(x.clone())
        x += late.detach()
        return F.cross_entropy(self.head(late + x), y)


@habit(plain=False, shows=False, observed=("found",))
class BatchPlusEarlyValue(LooksAtBatch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x.add_(self.layers[0](x.clone()).detach())
        return F.cross_entropy(self.head(self.features(x)), y)


@habit(plain=False, shows=False)
class BatchWrittenTwice(Noting):
    """No hook looks at it, but the next epoch does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x.clamp_(-1, 1)
        early = self.layers[1](self.layers[0](x.clone()))
        x.zero_().add_(early.detach())
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](early)) + x), y)


@habit(plain=False, shows=False)
class ColumnOfBatchWritten(Noting):
    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {
            "x": torch.randn(SAMPLES, WIDTH, generator=generator),
            "y": torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        }

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        late = self.features(batch["x"].clone())
        batch["x"][:, 0] = late.detach()[:, 0]
        return F.cross_entropy(self.head(late + batch["x"]), batch["y"])


LENGTH = 30_000
"""Of samples that only the first stage gets."""


class Long(LooksAtBatch):
    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(SAMPLES, LENGTH, generator=generator)
        return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


@habit(plain=False, shows=False, observed=("found",))
class LongBatchScaled(Long):
    """As images are normalized in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x.mul_(0.9)
        return F.cross_entropy(self.head(self.features(x[:, :WIDTH])), y)


@habit(plain=False, shows=False, observed=("found",))
class LongBatchPlusLateValue(Long):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        late = self.features(x[:, :WIDTH].clone())
        x[:, :WIDTH] = x[:, :WIDTH].clone() + late.detach()
        return F.cross_entropy(self.head(late + x[:, :WIDTH]), y)


@habit(plain=False, shows=False)
class LongBatchPlusLateValueUnseen(Noting):
    """No hook looks at it, but the next epoch does."""

    batch = staticmethod(Long.batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        late = self.features(x[:, :WIDTH].clone())
        x[:, :WIDTH] = x[:, :WIDTH].clone() + late.detach()
        return F.cross_entropy(self.head(late + x[:, :WIDTH]), y)


@habit(plain=False, shows=False, observed=("found",))
class LongBatchKept(Noting):
    """The step writes into its batch and keeps it, and a hook reads what it has kept."""

    batch = staticmethod(Long.batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x.mul_(0.9)
        self.kept = x
        return F.cross_entropy(self.head(self.features(x[:, :WIDTH])), y)

    def on_train_epoch_end(self) -> None:
        self.found.append(self.kept.sum().item())


@habit(plain=False, shows=False, observed=("found",))
class WrittenByHand(LooksAtBatch):
    """With manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer: Any = self.optimizers()
        for _ in range(2):
            late = self.features(x.clone())
            loss = F.cross_entropy(self.head(late), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            x.add_(late.detach(), alpha=0.1)


@habit(plain=False, shows=False, calls=("validate", "test", "predict"), observed=("found",))
class WrittenInEvaluation(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def features(self, x: Tensor) -> Tensor:
        late = super().features(x.clone())
        x.copy_(late)
        return late

    def on_validation_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
        self.found.append(batch[0].sum().item())

    def on_test_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
        self.found.append(batch[0].sum().item())


@habit(plain=False, shows=False, observed=("found",))
class WrittenBesideExpanded(LooksAtBatch):
    """Another tensor of the batch has all of its rows in one place."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        row = torch.randn(1, WIDTH, generator=generator)
        return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator), row.expand(SAMPLES, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, row = batch
        late = self.features(x + row)
        x.copy_(late.detach())
        return F.cross_entropy(self.head(late), y)
