"""Where tensors begin in memory: sums of MKL's depend on whether that is a multiple of 16 bytes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import CLASSES, Layer, Layers
from tests.habits.table import habit

ODD = 13
"""Numbers of a sample: few of its rows begin at a multiple of 16 bytes."""


class OddLayer(Layer):
    def __init__(self) -> None:
        super().__init__(width=ODD)


class Odd(Layers):
    width = ODD
    layer = OddLayer

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(12, ODD, generator=generator), torch.randint(0, CLASSES, (12,), generator=generator)


@habit()
class OddSamples(Odd):
    """Micro-batches that begin anywhere, in the first layer and in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.features(x)
        loss = F.mse_loss(hidden, x) + F.cross_entropy(self.head(hidden), y)
        loss = loss + F.linear(x, self.layers[3].linear.weight).mean()
        self.log("loss", loss)
        return loss


@habit()
class OverlappingOddParts(Odd):
    """A batch whose tensors overlap in memory, of which the second goes into layers, too."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(12, 3, ODD, generator=generator)
        return x[:, :-1], x[:, 1:], torch.randint(0, CLASSES, (12,), generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, y = batch
        hidden = self.features(inputs) + self.layers[3](targets) + self.layers[1](targets[:, 0])[:, None]
        loss = F.mse_loss(hidden, targets) + F.cross_entropy(self.head(hidden[:, -1]), y)
        self.log("loss", loss)
        return loss


@habit()
class SlicesOfLatents(Odd):
    """Slices of hidden values go into layers of several stages, as styles do."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(8, 3, ODD, generator=generator), torch.randint(0, CLASSES, (8,), generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        latents = self.layers[0](x)
        early, late = latents[:, 1:].unbind(1)
        hidden = self.layers[1](latents[:, 1]) + self.layers[2](early) + self.layers[3](late) + latents[:, 0]
        loss = F.cross_entropy(self.head(hidden), y)
        self.log("loss", loss)
        return loss


@habit()
class OddPartsConcatenated(Odd):
    """Gradients that are parts of a larger one go back to several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4 * ODD, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        loss = F.cross_entropy(self.head(torch.cat(found, 1)), y)
        self.log("loss", loss)
        return loss


@habit()
class OddPartBetweenReads(Odd):
    """Slices cross between two reads that make steps go on differently."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[1](self.layers[0](x))
        part = torch.cat([hidden, hidden], 1)[:, 5 : 5 + ODD]
        if hidden.mean() > 0:
            part = part * 1.5
        hidden = self.layers[3](self.layers[2](part) + part)
        loss = F.cross_entropy(self.head(hidden), y)
        self.log("loss", loss / max(loss.item(), 1e-3))
        return loss


@habit()
class OddPartsRead(Odd):
    """Steps that read a value, whose forwards run before their Python from the third batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss.item())
        return loss


@habit()
class OddPartsWritten(Odd):
    """A batch that is written into by NumPy between its uses."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[0](x)
        x.numpy()[:, 0] = 0
        loss = F.cross_entropy(self(x) + self.head(hidden), y)
        self.log("loss", loss)
        return loss


@habit(plain=False)
class OddPartsKept(Odd):
    """Slices of hidden values are kept, and go through layers after the step."""

    kept: list[Tensor]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = torch.cat([self.layers[0](x), self.layers[1](x)], 1)
        self.kept = [*getattr(self, "kept", ())[-3:], hidden[:, 5 : 5 + ODD].detach()]
        return F.cross_entropy(self(x), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.log("kept", torch.stack([self(one).mean() for one in self.kept]).mean())


@habit()
class LargeOddTargets(Odd):
    """Targets of more than 64 KiB a micro-batch, which the last layer takes whole and in slices."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(12, 503, ODD, generator=generator), torch.randn(12, 503, ODD, generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, targets = batch
        hidden = self.features(x[:, 1])
        loss = F.mse_loss(hidden, self.layers[3](targets[:, 1])) + F.mse_loss(self.layers[2](targets), targets) * 0.1
        self.log("loss", loss)
        return loss


@habit(plain=False)
class OddBatchDeepCopied(Odd):
    """A copy of a dictionary with the batch and a value."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.layers[0](batch[0]).detach()
        copied = copy.deepcopy({"hidden": hidden, "batch": batch})
        copied["hidden"].mul_(2)
        x, y = copied["batch"]
        return F.cross_entropy(self(x), y) + copied["hidden"].mean()
