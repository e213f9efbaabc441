"""Loaders, datamodules and what is done to batches before the step."""

from __future__ import annotations

import random
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from tests.habits.modules import CLASSES, WIDTH, Evaluated, Layers
from tests.habits.table import error, habit


def samples(number: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(number, WIDTH, generator=generator), torch.randint(0, CLASSES, (number,), generator=generator)
    )


class OwnLoader(Evaluated):
    """Makes its own loaders, which the harness leaves to it."""

    def val_dataloader(self) -> Any:
        return DataLoader(samples(16, 2), batch_size=8)


@habit(plain=False, shows=False, observed=["order"])  # the order of samples is observed
class Shuffles(OwnLoader):
    """shuffle=True, with the last batch smaller than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def train_dataloader(self) -> Any:
        return DataLoader(samples(21, 1), batch_size=8, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.order += (batch[0][:, 0] * 1000).int().tolist()
        return super().training_step(batch, batch_idx)


class Noisy(TensorDataset):
    """Augments by Python's generator as a sample is fetched."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * random.random() + 0.1 * torch.randn(WIDTH), y


@habit(plain=False)
class AugmentsInDataset(OwnLoader):
    """A dataset draws at random, in the process of the loop."""

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(*samples(24, 1).tensors), batch_size=8, shuffle=True)


class Remembering(TensorDataset):
    """Keeps how far it has come, and its latest samples, the oldest of which it forgets."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.share, self.latest = Fraction(0), OrderedDict[int, int]()

    def __getitem__(self, index: int) -> Any:
        self.share += Fraction(1, 3)
        self.latest[index % 5] = index
        self.latest.move_to_end(index % 5)
        if len(self.latest) > 3:
            self.latest.popitem(last=False)
        return super().__getitem__(index)


@habit(plain=False)
class WeighsByWhatDatasetKeeps(OwnLoader):
    """The step uses objects of Python's own that a dataset keeps, and the order of its cache."""

    def train_dataloader(self) -> Any:
        self.data = Remembering(*samples(24, 1).tensors)
        return DataLoader(self.data, batch_size=8, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = float(self.data.share % 2) + 0.1 * next(iter(self.data.latest))
        return weight * super().training_step(batch, batch_idx)


class Record:
    def __init__(self, index: int) -> None:
        self.index, self.number = index, 0


class Recording(TensorDataset):
    """Keeps records of what was fetched, and counts in the latest of them."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.records: list[Record] = []
        self.latest = Record(-1)

    def __getitem__(self, index: int) -> Any:
        self.latest.number += 1
        if index % 3 == 0:
            self.latest = Record(index)
            self.records.append(self.latest)
        return super().__getitem__(index)


@habit(plain=False)
class WeighsByRecordsOfDataset(OwnLoader):
    """The step uses objects that a dataset has made, refers to from two places, and changes later by one of them."""

    def train_dataloader(self) -> Any:
        self.data = Recording(*samples(24, 1).tensors)
        return DataLoader(self.data, batch_size=8, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = sum(one.number * (1 + one.index % 2) for one in self.data.records) / len(self.data)
        return (1.0 + weight) * super().training_step(batch, batch_idx)


@habit(plain=False, observed=["counts"])
class TwoValidationLoaders(Evaluated):
    """Two validation loaders, with dataloader_idx in the step and lists for each."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, list[Tensor]] = {0: [], 1: []}
        self.counts: list[Any] = []

    def val_dataloader(self) -> Any:
        return [DataLoader(samples(16, 2), batch_size=8), DataLoader(samples(8, 3), batch_size=8)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.outputs[dataloader_idx].append(loss)
        self.log("val_loss", loss)
        self.log(f"own/{dataloader_idx}", loss, add_dataloader_idx=False)

    def on_validation_epoch_end(self) -> None:
        self.counts.append([len(outputs) for outputs in self.outputs.values()])
        for number, outputs in self.outputs.items():
            self.log(f"mean/{number}", torch.stack(outputs).mean())
            outputs.clear()


@habit(plain=False)
class TwoTrainingLoaders(OwnLoader):
    """A CombinedLoader of labelled and unlabelled batches, of which the second is used for a consistency loss."""

    def train_dataloader(self) -> Any:
        loaders = {
            "labelled": DataLoader(samples(24, 1), batch_size=8),
            "rest": DataLoader(samples(16, 4), batch_size=8),
        }
        return CombinedLoader(loaders, "max_size_cycle")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["labelled"]
        other = batch["rest"][0]
        logits = self(torch.cat([x, other]))
        first, second = logits[: len(x)], logits[len(x) :]
        return F.cross_entropy(first, y) - 0.1 * (second.softmax(-1) * F.log_softmax(second, -1)).sum(-1).mean()


@habit(plain=False, observed=["seen"], without={"scale": 1.0})
class ChangesBatchInHooks(Layers):
    """on_before_batch_transfer, transfer_batch_to_device and on_after_batch_transfer each change the batch."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append("before")
        return batch[0] * self.scale, batch[1]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.seen.append("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append("after")
        return batch[0] + 0.1, batch[1]


@habit(plain=False, observed=["sums"])
class ReadsBatchInHooks(Layers):
    """on_train_batch_start reads the batch as numbers, and skips the rest of the epoch by returning -1."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.sums.append(batch[0].sum().item())
        return -1 if self.current_epoch == 1 and batch_idx == 1 else None


@habit(plain=False, observed=["taken"])
class StepTakesIterator(Evaluated):
    """training_step(dataloader_iter), and validation_step likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[int, int]] = []

    def training_step(self, dataloader_iter: Any) -> Tensor:
        (x, y), batch_idx, dataloader_idx = next(dataloader_iter)
        self.taken.append((batch_idx, dataloader_idx))
        loss = F.cross_entropy(self(x.to(self.device)), y) * (1 + 0.1 * batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def validation_step(self, dataloader_iter: Any) -> Tensor:
        batch, batch_idx, _ = next(dataloader_iter)
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]) + batch_idx, batch_size=len(batch[0]))
        return batch[0].sum()


@habit(plain=False, observed=["ids"])
class BatchIndexUsed(Layers):
    """batch_idx and the Trainer's numbers of batches are used in the step's formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer = self.trainer
        progress = (self.current_epoch * trainer.num_training_batches + batch_idx) / trainer.estimated_stepping_batches
        self.ids.append((batch_idx, trainer.num_training_batches, trainer.is_last_batch, round(progress, 6)))
        return super().training_step(batch, batch_idx) * (1 - 0.5 * progress)


@habit(plain=False)
class UnlabelledBatchesAreLarger(Evaluated):
    """As FixMatch has them: each loader's batch is split by itself, and the last ones differ in another way."""

    def train_dataloader(self) -> Any:
        loaders = {"labelled": DataLoader(samples(12, 1), 4), "unlabelled": DataLoader(samples(43, 3), 12)}
        return CombinedLoader(loaders, "max_size_cycle")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, y), (others, _) = batch["labelled"], batch["unlabelled"]
        logits = self.head(self.features(torch.cat([x, others])))
        confident = logits[len(x) :].softmax(-1).amax(-1).mean()
        self.log("loss", loss := F.cross_entropy(logits[: len(x)], y) + 0.1 * confident, on_epoch=True)
        return loss


@habit(plain=False, shows=False)
class LoadersInAList(UnlabelledBatchesAreLarger):
    def train_dataloader(self) -> Any:
        return CombinedLoader(list(super().train_dataloader().iterables.values()), "max_size")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labelled, unlabelled = batch
        first = labelled if labelled is not None else unlabelled
        return super().training_step({"labelled": first, "unlabelled": unlabelled or labelled}, batch_idx)


@habit(plain=False, calls=["fit", "predict"])
class LastBatchIsSmallerThanItsNumberOfFields(OwnLoader):
    """Batches of two samples, [x, y], of which the last has one: as many items as the loader's batch size, and fewer
    rows. The validation's are three fields of three samples.
    """

    def train_dataloader(self) -> Any:
        return DataLoader(samples(5, 1), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*samples(5, 2).tensors, torch.linspace(0.5, 1.5, 5)), batch_size=3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, weights = batch
        self.log("val_loss", (F.cross_entropy(self(x), y, reduction="none") * weights).mean())

    def predict_dataloader(self) -> Any:
        return self.train_dataloader()


@habit(plain=False)
class CollatesListsOfFields(OwnLoader):
    """collate_fn and a hook on batches are the module's own, and the last batch has one sample."""

    def train_dataloader(self) -> Any:
        return DataLoader(samples(5, 1), batch_size=2, collate_fn=self.collated)

    @staticmethod
    def collated(rows: list[Any]) -> list[Tensor]:
        return [torch.stack(field) for field in zip(*rows, strict=True)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


@habit(plain=False, calls=["fit", "validate"], expect=error(r"a list of 4 items.*stack the samples in collate_fn"))
class ValidatesOnSamplesInAListAfterTheFit(OwnLoader):
    """The fit validates on stacked samples, `trainer.validate` on a list of them."""

    def val_dataloader(self) -> Any:
        stacks = self.trainer.state.fn == "fit"
        return DataLoader(samples(8, 2), batch_size=4, collate_fn=default_collate if stacks else list)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.state.fn != "fit":
            batch = default_collate(batch)
        super().validation_step(batch, batch_idx)


@habit(plain=False, shows=False, expect=error(r"a list of 4 items.*stack the samples in collate_fn"))
class FewSamplesInAList(OwnLoader):
    """The only batch is a list of samples, of which there are fewer than the loader's batch size."""

    def train_dataloader(self) -> Any:
        return DataLoader(samples(4, 1), batch_size=8, collate_fn=list)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(default_collate(batch), batch_idx)


@habit(plain=False, shows=False)
class FewSamplesInFields(OwnLoader):
    """It is a list of fields, of which there are as many as samples."""

    def train_dataloader(self) -> Any:
        return DataLoader(samples(2, 1), batch_size=8, collate_fn=CollatesListsOfFields.collated)


@habit(plain=False, calls=["fit", "validate"])
class EvaluatesOnUnequalLoadersAtOnce(OwnLoader):
    """A CombinedLoader for validation, whose loaders give unequally many samples; the shorter one runs out."""

    def train_dataloader(self) -> Any:
        return DataLoader(samples(16, 1), batch_size=8)

    def val_dataloader(self) -> Any:
        return CombinedLoader([DataLoader(samples(22, 2), 8), DataLoader(samples(7, 3), 4)], "max_size")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for number, part in enumerate(batch):
            if part is not None:
                loss = F.cross_entropy(self(part[0]), part[1])
                self.log(f"val_loss/{number}", loss, batch_size=len(part[0]))


@habit(plain=False)
class UnequalLoadersAreNested(OwnLoader):
    """Loaders in a list in a dictionary, of unequally many samples."""

    def train_dataloader(self) -> Any:
        others = [DataLoader(samples(24, 2), batch_size=8), DataLoader(samples(12, 3), batch_size=4)]
        return {"a": DataLoader(samples(24, 1), batch_size=8), "b": others}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["a"]
        loss = F.cross_entropy(self(x), y)
        for number, (x, y) in enumerate(batch["b"]):
            loss = loss + 0.1 * (number + 1) * F.cross_entropy(self(x), y)
        self.log("loss", loss, on_epoch=True, batch_size=8)
        return loss


@habit(plain=False, shows=False, calls=["fit", "fit"], trainer={"reload_dataloaders_every_n_epochs": 1})
class SameCombinedLoaderAgain(OwnLoader):
    """One CombinedLoader, which Lightning sets up again for each epoch, and for a second fit."""

    def __init__(self) -> None:
        super().__init__()
        loaders = {"a": DataLoader(samples(24, 1), 8, shuffle=True), "b": DataLoader(samples(16, 4), 4)}
        self.__dict__["combined"] = CombinedLoader(loaders, "max_size_cycle")

    def train_dataloader(self) -> Any:
        return self.combined

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)
