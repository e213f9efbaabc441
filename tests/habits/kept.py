"""Tensors and other things that steps keep on the module and that later steps use, assigned anew or written into."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.habits.modules import WIDTH, Layers
from tests.habits.table import error, habit


@habit(observed=["mean"])
class RunningMeanOfFeatures(Layers):
    """A running mean is assigned anew in each step, and subtracted before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        self.mean = 0.9 * self.mean + 0.1 * features.mean(0).detach()
        return F.cross_entropy(self.head(features - self.mean), y)


@habit(observed=["mean"])
class RunningMeanWritten(Layers):
    """The same with a tensor that is the first step's, and written into from then on."""

    mean: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        own = features.detach().mean(0)
        if self.mean is None:
            self.mean = own
        else:
            self.mean.mul_(0.9).add_(own, alpha=0.1)
        return F.cross_entropy(self.head(features - self.mean), y)


@habit(plain=False, observed=["means"])
class RunningMeansInRows(Layers):
    """Running means in rows of a tensor: a row is taken, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.means = torch.zeros(2, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        row = self.means[batch_idx % 2]
        row.copy_(0.5 * row + 0.5 * features.detach().mean(0))
        return F.cross_entropy(self.head(features - self.means.mean(0)), y)


@habit(observed=["total", "number"])
class LossesAddedInPlace(Layers):
    """`self.total += loss.detach()`"""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())
        self.number = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.total += loss.detach()
        self.number += 1
        return loss


@habit(observed=["best", "count"])
class BestLossAsTensor(Layers):
    """The best loss so far, compared and kept as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.best: Tensor | None = None
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.best is None or loss < self.best:
            self.best = loss.detach()
            self.count += 1
        return loss


@habit(observed=["bank"])
class BankOfPlainTensor(Layers):
    """Rows of a tensor that is no buffer are overwritten, and compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.zeros(6, WIDTH)
        self.place = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        loss = F.cross_entropy(self.head(features), y)
        loss = loss + 0.1 * (features @ self.bank.clone().T).logsumexp(-1).mean()
        with torch.no_grad():
            self.bank[self.place % 6] = F.normalize(features.detach().mean(0), dim=0)
        self.place += 1
        return loss


@habit(observed=["sums"])
class FeaturesOfTwoStepsAgo(Layers):
    """A list of features, which steps reach back into, and a hook cuts short."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        self.history.append(features.detach())
        loss = F.cross_entropy(self.head(features), y)
        if len(self.history) > 2:
            loss = loss + 0.1 * (features - self.history[-3]).pow(2).mean()
        return loss

    def on_train_epoch_end(self) -> None:
        self.sums.append(float(torch.cat(self.history).sum()))
        self.history = self.history[-1:]


@habit(observed=["last", "before"])
class MeansHandedOn(Layers):
    """Two attributes: the means of the last step and of that before it are handed on from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.before: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        mean = features.mean(0)
        loss = F.cross_entropy(self.head(features), y)
        if self.before is not None:
            loss = loss + 0.1 * (mean - self.before).pow(2).sum() + 0.1 * (mean * self.last).sum()
        self.last, self.before = mean.detach(), mean.detach() if self.last is None else self.last
        return loss


@habit(plain=False)  # it goes by the batch's number
class KeptOfOneLayerOrAnother(Layers):
    """What is kept for the next step comes from an early layer or from the last, by turns."""

    kept: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        middle = self.layers[1](self.layers[0](x))
        own = middle.detach()
        features = self.layers[3](self.layers[2](middle + 0.2 * (own if self.kept is None else self.kept)))
        self.kept = own if batch_idx % 2 == 0 else features.detach()
        return F.cross_entropy(self.head(features), y)


@habit(observed=["seen"], plain=False)
class OutputsReadAtBatchEnd(Layers):
    """The step returns a dictionary, whose logits on_train_batch_end reads, and whose loss sets the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits.detach(), "number": len(y)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((outputs["logits"].argmax(-1).tolist(), outputs["number"], outputs["loss"].item()))
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 * min(1.0, float(outputs["loss"]))


@habit(automatic=error("weights gives its values once.*in a stage_config"))
class WeightsOfGenerator(Layers):
    """A generator object on the module yields the weight of each loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = (1 + 0.1 * number for number in range(1000))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * next(self.weights)


@habit(observed=["norms"], plain=False)
class GradientOfInputRead(Layers):
    """A copy of the input that requires a gradient is kept, and the gradient read after the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.input = x.clone().requires_grad_(True)
        return F.cross_entropy(self(self.input), y)

    def on_after_backward(self) -> None:
        self.norms.append(None if self.input.grad is None else self.input.grad.norm().item())


@habit(observed=["best"])
class LossBeforeRead(Layers):
    """The loss of the micro-batch before, never detached, is compared with, read, and part of the next one's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.best = float("inf")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.last is not None:
            if loss > self.last:
                loss = loss * 0.9
            self.best = min(self.best, float(self.last))
            loss = loss * (1 + 0.1 * self.last.item()) + 0.1 * self.last.detach() + (self.last > 1).float()
        self.last = loss
        return loss


@habit(
    expect=error(r"earlier micro-batch.*kept\.py:\d+.*detach"),
    automatic=error(r"backward through the graph a second time"),
    without={"weight": 0.0},
    plain=False,
    shows=False,
)
class LossBeforeInGraph(Layers):
    """The loss before is added as it is, whose graph is gone: torch's own error in one process."""

    weight = 0.1
    last: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        found = loss if self.last is None else loss + self.weight * self.last
        self.last = loss
        return found


@habit(plain=False, observed=["sums"], automatic=error(r"\bself\.more gives its values once.*in a stage_config"))
class SecondLoaderTakenInStep(Layers):
    """The step takes batches of a loader of its own, of which the module keeps the iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def on_fit_start(self) -> None:
        self.more = iter(DataLoader(torch.arange(2.0 * 64 * WIDTH).view(-1, WIDTH) / 1000, batch_size=2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = next(self.more)
        self.sums.append(x.sum().item())
        return super().training_step(batch, batch_idx) + 0.1 * self(x).square().mean()
