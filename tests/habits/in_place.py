"""Writes into batch tensors, hidden values and buffers, through all that shares their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import WIDTH, Layer, Layers
from tests.habits.table import habit


@habit(without={"scale": 1.0})
class BatchScaledInPlace(Layers):
    """`x.mul_()` on the batch's own tensor, which is compared with at the end."""

    scale = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x.mul_(self.scale)
        features = self.features(x)
        return F.cross_entropy(self.head(features), y) + F.mse_loss(features, batch[0])


@habit(without={"writes": False})
class BatchMaskedByIndex(Layers):
    """BERT's masking: rows and columns of the batch are overwritten, by indices, before and after their use."""

    writes = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        original = x.clone()
        if self.writes:
            x[:, 0] = 0
            x[x > 1.5] = 1.5
        features = self.features(x.clone())
        if self.writes:
            x[:, 1:3] = 1.0
        return F.cross_entropy(self.head(features + 0.1 * x), y) + F.mse_loss(features, original)


@habit(without={"writes": False})
class BatchWrittenByView(Layers):
    """A view of the batch's tensor is written to in the middle of the model."""

    writes = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        part = x.view(-1, 2, WIDTH // 2)[:, 1]
        features = self.layers[1](self.layers[0](x.clone()))
        if self.writes:
            part.add_(0.5)
        features = self.layers[3](self.layers[2](features + x))
        return F.cross_entropy(self.head(features), y)


@habit(without={"writes": False})
class BatchWrittenByNumpy(Layers):
    """Numpy writes into the memory of the batch's tensor."""

    writes = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        array = x.numpy()
        if self.writes:
            array[:, ::2] *= 0.5
            array[array > 1] = 1
        return F.cross_entropy(self(x), y) + 0.1 * x.sum() * self.head.bias.sum()


@habit(without={"writes": False})
class LabelsSmoothedInPlace(Layers):
    """scatter_ and fill_ on a tensor made from labels, and on the labels themselves."""

    writes = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        if self.writes:
            y[y == 3] = 0
        target = torch.full_like(logits, 0.05).scatter_(1, y.unsqueeze(1), 0.85)
        return -(target * F.log_softmax(logits, -1)).sum(-1).mean()


@habit(without={"writes": False})
class BatchDictionaryChanged(Layers):
    """The batch is a dictionary from which the step pops, and to which it adds."""

    writes = True

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x, y = Layers.batch(generator)
        return {"x": x, "y": y, "weight": torch.rand(len(x), generator=generator)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = batch.pop("y")
        batch["hidden"] = self.features(batch["x"])
        if self.writes:
            batch.update(hidden=batch["hidden"] * batch.pop("weight").unsqueeze(1))
        return F.cross_entropy(self.head(batch["hidden"]), y)


@habit(without={"value": None})
class HiddenWrittenByIndex(Layers):
    """A column of each hidden value is overwritten: of received ones as well."""

    value: float | None = 0.3

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.value is not None:
                x[:, 0] = self.value
                x[0] += 0.1
        return x


@habit(without={"value": 0.0})
class HiddenWrittenByData(Layers):
    """`x.data.add_()`, which autograd does not see."""

    value = 0.2

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.data.add_(self.value)
        return x


@habit(without={"value": 0.0})
class HiddenWrittenByDetached(Layers):
    """The same through `.detach()`, and through a view of it."""

    value = 0.2

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.detach()[:, 1:].sub_(self.value)
        return x


@habit(without={"value": 1.0})
class HiddenWrittenByNumpy(Layers):
    """The same through numpy."""

    value = 0.5

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.detach().numpy()[:, -1] *= self.value
        return x


@habit(without={"layer": Layer})
class InPlaceActivations(Layers):
    """An activation in place on what a layer was given, and `+=` on what it returns."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.act = nn.LeakyReLU(0.3, inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(self.act(x))
            y += 0.1
            return y

    layer = InPlace


@habit(without={"writes": False})
class SkipWrittenLater(Layers):
    """A hidden value of the first stage is kept as a skip, and changed in place before it is used on the last."""

    writes = True

    def features(self, x: Tensor) -> Tensor:
        first = torch.sin(self.layers[0](x))
        x = self.layers[2](self.layers[1](first * 1.0))
        if self.writes:
            first.masked_fill_(first < 0, 0.0)
        return self.layers[3](x + first)


@habit()
class FilledStepByStep(Layers):
    """A tensor for all layers' results is made first and filled by slices."""

    def features(self, x: Tensor) -> Tensor:
        filled = torch.zeros(len(x), len(self.layers), WIDTH)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            filled[:, number] = x
        return filled.mean(1)


@habit()
class WrittenWithOut(Layers):
    """`out=` writes masks and positions into a buffer that is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.empty(WIDTH)

    def features(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            torch.linspace(0.5, 1.0 + 0.1 * number, WIDTH, out=self.scratch)
            x = layer(x) * self.scratch.clone()
        return x


@habit()
class TokensPermutedInPlace(Layers):
    """index_copy_, index_fill_ and masked_scatter_ on copies of hidden values."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            order = x.detach()[:, 0].argsort()
            y = torch.zeros_like(x).index_copy_(0, order, x)
            y = y.index_fill_(1, torch.tensor([2]), 0.1)
            x = y.masked_scatter_(torch.eye(len(y), WIDTH, dtype=torch.bool), x.detach().flatten())
        return x


@habit(without={"scale": 1.0})
class GradientDetachedCopyWritten(Layers):
    """A detached clone is written to, and does not change what it was made from."""

    scale = 3.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        middle = self.layers[1](self.layers[0](x))
        target = middle.detach().clone()
        target *= self.scale
        features = self.layers[3](self.layers[2](middle))
        return F.cross_entropy(self.head(features), y) + 0.1 * F.mse_loss(features, target)


@habit(plain=False)
class ArraysChangedLater(Layers):
    """NumPy's arrays choose columns, and are added as tensors, before the step changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(WIDTH)
        self.shift = np.linspace(0, 1, WIDTH, dtype=np.float32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[1](self.layers[0](x))[:, self.order] + torch.as_tensor(self.shift)
        self.order[:] = np.roll(self.order, 1)
        self.shift *= 0.9
        hidden = self.layers[2](hidden)[:, self.order] + torch.asarray(self.shift)
        self.shift += 0.05
        return F.cross_entropy(self.head(self.layers[3](hidden)), y)


@habit(plain=False)
class ScaledByDataAfterUse(Layers):
    """What a product was taken with is scaled by `.data` and by NumPy, before its backward, which autograd misses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.weights = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[1](self.layers[0](x)) * self.scale
        self.scale.data.mul_(0.9)
        hidden = self.layers[2](hidden) * torch.from_numpy(self.weights)
        self.weights *= 0.9
        return F.cross_entropy(self.head(self.layers[3](hidden)), y)
