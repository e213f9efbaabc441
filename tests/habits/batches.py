"""How the tensors of a batch lie in memory: transposed, with holes, expanded, as windows, overlapping one another;
and what a batch is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Evaluated, Layers
from tests.habits.table import error, habit


def labels(generator: torch.Generator) -> Tensor:
    return torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


@habit(shows=False, plain=False)
class TransposedBatch(Layers):
    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(WIDTH, SAMPLES, generator=generator).t(), labels(generator)


@habit(shows=False, plain=False)
class TimeFirstBatch(Layers):
    """A loader that keeps time first, and a module that wants the batch first."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(3, SAMPLES, WIDTH, generator=generator).transpose(0, 1), labels(generator)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x).mean(1)


class ConvLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.conv(x)))


def channels_last_batch(generator: torch.Generator) -> Any:
    images = torch.randn(SAMPLES, 2, 2, 2, generator=generator)
    return images.to(memory_format=torch.channels_last), labels(generator)


@habit(shows=False, plain=False)
class ChannelsLastBatch(Layers):
    layer = ConvLayer
    batch = staticmethod(channels_last_batch)

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x).flatten(1)


@habit(shows=False, plain=False, calls=("validate", "predict"))
class ChannelsLastBatchEvaluated(Evaluated):
    layer = ConvLayer
    batch = staticmethod(channels_last_batch)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x).flatten(1)


@habit(shows=False, plain=False)
class PermutedInTransfer(Layers):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x.view(SAMPLES, 2, WIDTH // 2).permute(0, 2, 1), y

    def features(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return super().features(x.flatten(1) * (0.5 if x.is_contiguous() else 1.0))


@habit(shows=False, plain=False)
class AsksForContiguity(Layers):
    """Every second column of wider data, and code that goes on differently with those."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(SAMPLES, 2 * WIDTH, generator=generator)[:, ::2], labels(generator)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x if x.is_contiguous() else x * 0.5)


@habit(shows=False, plain=False)
class TriesView(Layers):
    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(2, WIDTH // 2, SAMPLES, generator=generator).permute(2, 0, 1), labels(generator)

    def features(self, x: Tensor) -> Tensor:
        try:
            x = x.view(-1, WIDTH)
        except RuntimeError:
            x = x.reshape(-1, WIDTH) * 0.5
        return super().features(x)


@habit(shows=False, plain=False)
class ExpandedBatch(Layers):
    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(SAMPLES, 1, generator=generator).expand(SAMPLES, WIDTH), labels(generator)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x * 0.5 if x.stride(1) == 0 else x)


@habit(shows=False, plain=False)
class WindowsOfSeries(Layers):
    """Sliding windows over a time series, which share memory."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        series = torch.randn(SAMPLES + WIDTH - 1, generator=generator)
        return series.unfold(0, WIDTH, 1), labels(generator)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x * 0.5 if x.stride() == (1, 1) else x)


@habit(shows=False, plain=False)
class TensorAndView(Layers):
    """A tensor of the batch and a view of it, of which one is written into."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        return {"x": x, "part": x[:, :4], "y": labels(generator)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.features(batch["x"].clone())
        batch["x"].mul_(0.5)
        return F.cross_entropy(self.head(h + batch["part"].sum(1, keepdim=True)), batch["y"])


@habit(shows=False, plain=False)
class ShiftedTokens(Layers):
    """Inputs and targets are slices of the same tokens, and inputs are masked in place."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        tokens = torch.randint(1, CLASSES, (SAMPLES, WIDTH + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x[:, 3] = 0
        logits = self(x.float())
        return F.cross_entropy(logits, y[:, -1]) + F.cross_entropy(logits, y[:, 2])


@habit(expect=error(r"batches\.py:\d+.*write into a clone"), shows=False, plain=False)
class ShiftedLargeTokens(Layers):
    """Likewise, too much of it for every rank to have."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        tokens = torch.randint(1, CLASSES, (SAMPLES, 20_000), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x[:, 3] = 0
        return F.cross_entropy(self(x[:, :WIDTH].float()), y[:, 2])


@habit(shows=False, plain=False)
class SlicesOfLargeTokens(Layers):
    """Likewise, without a write."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        tokens = torch.randint(0, CLASSES, (SAMPLES, 20_000), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x[:, :WIDTH].float()), y[:, 2])


@habit(expect=error(r"batches\.py:\d+.*write into a clone"), shows=False, plain=False)
class FirstColumnsOfLargeTokens(Layers):
    """The batch has all tokens and the first ones, of which every rank could have the latter."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        tokens = torch.randint(1, CLASSES, (SAMPLES, 20_000), generator=generator)
        return tokens, tokens[:, :WIDTH]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, first = batch
        first[:, 3] = 0
        return F.cross_entropy(self(first.float()), tokens[:, 3])


class Boxes(Dataset[Any]):
    """Images of different heights, each with boxes and their classes."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        number = 1 + index % 3
        target = {
            "boxes": torch.rand(number, 4, generator=generator),
            "labels": torch.randint(0, CLASSES, (number,), generator=generator),
        }
        return torch.randn(3 + index % 4, WIDTH, generator=generator), target


@habit(plain=False, shows=False)
class DetectsObjects(Layers):
    """Batches are lists of images and of dictionaries, which cannot be stacked; the last one is smaller."""

    @staticmethod
    def collate(samples: Any) -> Any:
        return tuple(zip(*samples, strict=True))

    def train_dataloader(self) -> Any:
        return DataLoader(Boxes(), batch_size=7, collate_fn=self.collate)

    val_dataloader = train_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for image, target in zip(*batch, strict=True):
            hidden = self.features(image).mean(0)
            logits = self.head(hidden).expand(len(target["labels"]), -1)
            losses.append(F.cross_entropy(logits, target["labels"]) + target["boxes"].mean() * hidden.mean())
        return torch.stack(losses).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=len(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("boxes", float(sum(len(target["boxes"]) for target in batch[1])), batch_size=len(batch[0]))


@habit(plain=False, shows=False)
class DetectsObjectsInLists(DetectsObjects):
    @staticmethod
    def collate(samples: Any) -> Any:
        return [list(field) for field in zip(*samples, strict=True)]


@habit(plain=False, shows=False)
class DetectsObjectsInStackedImages(DetectsObjects):
    """As DETR's batches: images of one size are stacked, and their boxes are a list of dictionaries."""

    @staticmethod
    def collate(samples: Any) -> Any:
        images, targets = zip(*samples, strict=True)
        return {"pixel_values": torch.stack([image[:3] for image in images]), "labels": list(targets)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["pixel_values"], batch["labels"]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("boxes", float(sum(len(target["boxes"]) for target in batch["labels"])))


class Items(dict[str, Any]):
    """A dictionary whose items are its attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@habit(calls=("fit", "predict"), observed=["settings.seen"], shows=False)
class ItemsAsAttributes(Evaluated):
    """Dictionaries whose attributes are their items, where a missing one is a KeyError: batches, settings, results."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Items(scale=0.5, seen=0, inner=Items(depth=2))

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x, y = Evaluated.batch(generator)
        return Items(x=x, y=y, more=Items(ids=list(range(len(x)))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.settings.seen += len(batch.more.ids)
        logits = self(batch.x) * self.settings.scale
        return Items(loss=F.cross_entropy(logits, batch.y), logits=logits.detach())

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self(batch.x), batch.y))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return Items(logits=self(batch.x), ids=batch.more.ids)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("sum", outputs["logits"].sum() * self.settings.inner.depth)
