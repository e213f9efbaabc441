"""Hooks that iterate the Trainer's loaders, as clustering, calibration and initialization by data do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.habits.loaders import Noisy, OwnLoader, samples
from tests.habits.modules import WIDTH, Evaluated, Layers
from tests.habits.table import error, habit


@habit(plain=False)
class CountsBatches(Layers):
    def on_train_epoch_start(self) -> None:
        self.log("count", float(sum(1 for _ in self.trainer.train_dataloader)))


@habit(plain=False)
class FeaturesOfAllData(Layers):
    """Features of all data before each epoch, of which a buffer in the middle keeps the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            found = torch.cat([self.features(x) for x, _ in self.trainer.train_dataloader])
        self.mean.copy_(found.mean(0))
        self.log("spread", found.std())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.features(x) - self.mean), y)


@habit(plain=False)
class InitializedByFirstBatch(Layers):
    """Scales its head by the features of a first batch."""

    def on_train_start(self) -> None:
        x, _ = next(iter(self.trainer.train_dataloader))
        with torch.no_grad():
            self.head.weight.div_(self.features(x).std())


class Prototypes(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        sums = torch.zeros(4, WIDTH)
        with torch.no_grad():
            for x, y in trainer.train_dataloader:
                sums.index_add_(0, y, pl_module.features(x))
        pl_module.prototypes = sums


@habit(plain=False, shows=False, observed=["prototypes"], callbacks=lambda: [Prototypes()])
class ShuffledInCallback(OwnLoader):
    """A callback goes through a loader that shuffles and augments at random, between epochs that do, too."""

    prototypes: Any = None

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Noisy(*samples(16, 1).tensors), batch_size=8, shuffle=True, generator=generator)


@habit(plain=False, calls=("fit", "validate"))
class NormalizedByValidationData(Evaluated):
    def on_validation_epoch_start(self) -> None:
        loader = self.trainer.val_dataloaders
        self.scale = torch.cat([x for x, _ in loader]).std()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().validation_step((x / self.scale, y), batch_idx)


class Rows(Dataset[Tensor]):
    """Rows of what a function gives, with a layer's output if there is one."""

    def __init__(self, rows: Any, layer: Any = None) -> None:
        self.rows, self.layer = rows, layer

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        row = self.rows()[index]
        return row if self.layer is None else self.layer(row).detach()


@habit(plain=False, shows=False, observed=["sums"])
class WorkersOverFeatures(Evaluated):
    """Loaders with workers over features and weights, as for a probe on them; one on the first rank alone."""

    def on_train_start(self) -> None:
        self.sums: list[float] = []

    def on_validation_epoch_end(self) -> None:
        features = self.features(torch.arange(4.0 * WIDTH).reshape(4, WIDTH)).detach()
        bank = TensorDataset(features, torch.arange(4))
        sums = [float(x.sum()) for x, _ in DataLoader(bank, batch_size=3, num_workers=2, shuffle=True)]
        self.log("first", sums[0])
        if self.global_rank == 0:
            again = DataLoader(bank, batch_size=2, num_workers=1, generator=torch.Generator())
            assert sum(float(x.sum()) for x, _ in again) == pytest.approx(sum(sums), rel=1e-5)
        features.mul_(2)  # what the workers were given is this rank's no more
        self.log("later", features.sum())

    def on_train_epoch_end(self) -> None:
        weight = self.head.weight.detach()
        self.sums += [float(row.sum()) for row in DataLoader(Rows(lambda: weight), num_workers=1)]


@habit(
    plain=False,
    shows=False,
    expect=error(r"needs the data of .*layers\.3.*modules\.py:\d+.*worker has no connection.*num_workers=0"),
)
class WorkersRunLayer(Layers):
    """A loader's worker calls a layer of the module."""

    def on_train_epoch_end(self) -> None:
        list(DataLoader(Rows(lambda: torch.ones(4, WIDTH), self.layers[3]), num_workers=1))
