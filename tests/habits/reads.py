"""Values that Python reads from tensors while a step runs."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import Tensor, nn

from tests.habits.modules import CLASSES, WIDTH, Evaluated, Layer, Layers
from tests.habits.table import habit


@habit(observed=["losses"])
class LossReadByItem(Layers):
    """`loss.item()` is kept and logged."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        self.log("loss_item", loss.item(), prog_bar=True)
        return loss


@habit(observed=["scores"])
class SklearnMetric(Layers):
    """scikit-learn's F1 of predictions that went through `.cpu().numpy()`, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        guesses = logits.argmax(1).detach().cpu().numpy()
        self.scores.append(float(f1_score(y.cpu().numpy(), guesses, average="macro", labels=range(CLASSES))))
        self.log("f1", self.scores[-1])
        return F.cross_entropy(logits, y)


@habit(observed=["scores"])
class SklearnMetricInValidation(Evaluated):
    """The same over the whole validation, when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[Any] = []
        self.scores: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.pairs.append((y.numpy(), self(x).softmax(-1).argmax(-1).numpy()))

    def on_validation_epoch_end(self) -> None:
        targets, guesses = (np.concatenate(parts) for parts in zip(*self.pairs, strict=True))
        self.scores.append(float(f1_score(targets, guesses, average="micro")))
        self.log("val_f1", self.scores[-1])
        self.pairs.clear()


@habit(observed=["checked"])
class ChecksForNaN(Layers):
    """`if torch.isnan(loss)` after each loss, and asserts inside of layers."""

    class Checking(Layer):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.isfinite(x).all(), "not finite"
            return super().forward(x)

    layer = Checking
    checked = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if torch.isnan(loss) or torch.isinf(loss):
            raise ValueError("the loss is not finite")
        self.checked += 1
        return loss


@habit(observed=["replaced"], without={"limit": 1e9})
class LossReplacedIfLarge(Layers):
    """A loss above a limit is replaced by zero times the output."""

    limit = 1.6

    def __init__(self) -> None:
        super().__init__()
        self.replaced = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        if loss > self.limit:
            self.replaced += 1
            return 0.0 * logits.sum()
        return loss


@habit(prints=True)
class Prints(Layers):
    """Losses, shapes and features are printed, by print and in f-strings."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        loss = F.cross_entropy(self.head(features), y)
        print(f"step {self.global_step}: loss {loss:.4f}, {features.shape}, {features.dtype}")
        print("features", features[0, :3], loss, features.requires_grad)
        return loss


@habit(prints=True, shows=False)  # what is printed is compared
class PrintsInLayers(Layers):
    """Layers print their inputs' means."""

    class Printing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            print(f"mean {x.mean():.5f} of", repr(x.detach().sum()))
            return super().forward(x)

    layer = Printing


@habit(observed=["lists"])
class ListsOfPredictions(Layers):
    """`.tolist()` of predictions and of the largest features."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        middle = self.layers[1](self.layers[0](x))
        logits = self.head(self.layers[3](self.layers[2](middle)))
        values, places = middle.topk(2)
        self.lists.append((logits.argmax(-1).tolist(), values.tolist(), places.tolist(), int(y[0])))
        return F.cross_entropy(logits, y)


@habit()
class ThresholdFromQuantile(Layers):
    """A float of a hidden value's quantile is used on later stages."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            bound = float(torch.quantile(x.detach(), 0.8))
            x = x.clamp(max=bound)
        return x


@habit()
class RowsByNonzero(Layers):
    """`nonzero()` and `unique()` of hidden values: their sizes depend on the data."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        rows, columns = (x > 0.5).nonzero(as_tuple=True)
        levels = x.detach().mul(2).round().unique()
        x = x + 0.01 * len(levels) + 0.1 * torch.zeros_like(x).index_put((rows, columns), x[rows, columns])
        return self.layers[3](self.layers[2](x))


@habit()
class LossOfSelected(Layers):
    """Online hard-example mining: only losses above their mean count."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        hard = losses[losses > losses.mean().item()]
        return hard.mean() if len(hard) else losses.mean()


@habit(observed=["rounds"])
class LoopsUntilSmall(Layers):
    """A while loop on the norm of a hidden value."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[int] = []

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        rounds = 0
        while x.norm() > 2.0 and rounds < 20:
            x = 0.8 * x
            rounds += 1
        self.rounds.append(rounds)
        return self.layers[3](self.layers[2](x))


@habit(observed=["depths"])
class HaltsByData(Layers):
    """Adaptive computation: layers are left out once the features are sure enough."""

    def __init__(self) -> None:
        super().__init__()
        self.depths: list[int] = []

    def features(self, x: Tensor) -> Tensor:
        for depth, layer in enumerate(self.layers):
            x = layer(x)
            if depth != 3 and x.abs().mean() > 1.0:
                x = 0.5 * x
        self.depths.append(sum(1 for value in x.abs().mean(0).tolist() if value > 1))
        return x


@habit(observed=["class_weights"])
class ClassWeightsFromBatch(Layers):
    """Weights of classes from the batch's labels, by bincount and a loop over ints."""

    def __init__(self) -> None:
        super().__init__()
        self.class_weights = [1.0] * CLASSES

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for label in y.tolist():
            self.class_weights[label] *= 0.95
        counts = np.bincount(y.numpy(), minlength=CLASSES)
        weight = torch.tensor(self.class_weights) / torch.from_numpy(1 + counts).float()
        return F.cross_entropy(self(x), y, weight=weight)


@habit(observed=["perplexities"])
class MathOnReads(Layers):
    """math.exp, round, min, max, int and comparisons of what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.perplexities: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.perplexities.append((math.exp(loss), round(float(loss), 3), int(loss * 100), max(loss.item(), 1.0)))
        return loss * (2.0 if 1 < loss < 2 else 1.0)


@habit(observed=["stats"])
class NumpyOfHidden(Layers):
    """numpy functions are applied to tensors directly, and to arrays of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        middle = self.layers[1](self.layers[0](x))
        array = np.asarray(middle.detach())
        self.stats.append((float(np.median(array)), float(np.percentile(array, 90)), array.shape))
        scale = torch.as_tensor(1 / (1 + np.abs(array).mean(axis=0)), dtype=torch.float32)
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](middle * scale))), y)


class Periodic(nn.Module):
    """Reads its input's periods, as TimesNet does, and uses the input before, through views, and after."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1).abs()
        _, periods = torch.topk(spectrum.mean(0)[1:4], 2)
        parts = [self.layer(x[:, :WIDTH] * (period + 1)) for period in periods.detach().cpu().numpy().tolist()]
        weights = spectrum[:, 1:3].softmax(1).unsqueeze(1)
        return (torch.stack(parts, -1) * weights).sum(-1) + x


@habit()
class ViewsAroundARead(Layers):
    """Each layer goes on with what it has read of its input, and with views of that."""

    layer = Periodic


@habit(observed=["warned"])
class WarnsOnValue(Layers):
    """A warning that depends on a hidden value, caught and counted."""

    warned = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if features.abs().max() > 3:
                warnings.warn(f"large features: {features.abs().max().item():.2f}", stacklevel=1)
        self.warned += len(caught)
        return F.cross_entropy(self.head(features), y)


@habit(observed=["found"])
class ComparesTensors(Layers):
    """torch.equal, allclose, any, all, `in` and sorting by key."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        guess = logits.argmax(-1)
        order = sorted(range(len(y)), key=lambda row: logits[row].max().item())
        self.found.append(
            (torch.equal(guess, y), torch.allclose(logits, logits * 1.0), bool((guess == y).any()), order)
        )
        self.found.append((2 in y, y.max().item() in guess.tolist()))
        return F.cross_entropy(logits[order], y[order])


@habit(observed=["sizes"])
class SizesOfHidden(Layers):
    """len(), shape, numel(), ndim, dtype and iteration of hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.features(x)
        self.sizes.append((len(hidden), tuple(hidden.shape), hidden.numel(), hidden.ndim, str(hidden.dtype)))
        self.sizes.append(
            (hidden.is_contiguous(), hidden.stride(), hidden.requires_grad, hidden.is_leaf, hidden.size(-1))
        )
        return F.cross_entropy(self.head(hidden / math.sqrt(hidden.shape[-1] / WIDTH)), y)


@habit(plain=False, shows=False)
class ReadsBetweenUsesByHand(Layers):
    """A value is used before and after a read. Autograd orders its gradients by numbers that each thread counts, and
    micro-batches that are optimized by hand have threads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def features(self, x: Tensor) -> Tensor:
        if not self.trainer.global_step:
            torch._foreach_mul([torch.ones((), requires_grad=True)] * 10_000, 2.0)
        x = self.layers[0](x)
        found = self.layers[1](x)
        self.log("mean", found.mean().item())
        return self.layers[3](self.layers[2](found + torch.sin(x) + self.layers[1](x * x)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
