"""Buffers and weights that stages write into: in evaluation, where several ranks have them, and through views."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import CLASSES, WIDTH, Evaluated, Layers
from tests.habits.table import error, habit

OBSERVED = ["seen", "bank", "norm.running_mean", "head.bias"]
SHARED = r"shares its memory with another one.*written_buffers\.py:\d+.*clone"


class WritesInEvaluation(Evaluated):
    """No training step has told which rank uses what: all ranks have buffers that one of them writes into."""

    on_last_stage = ("norm",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("bank", torch.zeros(3, WIDTH))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.features(x)))
        return logits

    def on_test_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.bank.sum() + self.norm.running_var.sum() + self.head.bias.sum()))

    on_validation_batch_end = on_test_batch_end


@habit(calls=("test",), observed=OBSERVED, plain=False, shows=False)
class AdaptsNormsInTest(WritesInEvaluation):
    def on_test_start(self) -> None:
        self.norm.train()


@habit(calls=("validate", "fit", "test"), observed=OBSERVED, plain=False, shows=False)
class FitsAfterNormsWereAdapted(WritesInEvaluation):
    def on_validation_start(self) -> None:
        self.norm.train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x + 0.1 * self.norm.running_mean, y), batch_idx)


@habit(calls=("predict", "test"), observed=OBSERVED, plain=False, shows=False)
class BankFilledByPrediction(WritesInEvaluation):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.bank += self.features(batch[0]).mean(0)
        return super().predict_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("distance", (self.features(batch[0]) - self.bank[0]).norm())


@habit(calls=("fit",), observed=OBSERVED, plain=False, shows=False)
class BankFilledBySanityCheck(WritesInEvaluation):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.bank[batch_idx % 3] += self.features(batch[0]).mean(0)

    def on_validation_epoch_end(self) -> None:
        self.log("bank", self.bank.sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x - self.bank.mean(0), y), batch_idx)


@habit(calls=("test",), observed=OBSERVED, plain=False, shows=False)
class PrototypesWrittenInTest(WritesInEvaluation):
    """Weights that no module of a stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.zeros(CLASSES, WIDTH), requires_grad=False)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.features(batch[0])
        for label in range(CLASSES):
            self.prototypes[label] += hidden[batch[1] == label].sum(0)
        self.log("distance", torch.cdist(hidden, self.prototypes).mean())


@habit(calls=("test",), observed=OBSERVED, plain=False, shows=False)
class ReadEarlyWrittenLateInTest(WritesInEvaluation):
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.features(batch[0] + self.bank[0])
        self.bank.lerp_(hidden.mean(0).expand(3, -1), 0.5)
        self.log("logits", self.head(hidden).mean())


class FollowsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.copy_(torch.cos(self.weight.t() @ self.mean))
        return x @ self.weight


@habit(observed=["means"], plain=False, shows=False)
class WrittenOnOneStageOfTwo(Layers):
    """A module that is called on two stages writes into its buffer on one, as its weight is there first."""

    order = "xh"

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.after = nn.Linear(WIDTH, 1)
        self.tracker = self.make()

    def make(self) -> nn.Module:
        return FollowsItsWeight()

    def chain(self) -> list[str]:
        return ["layers.0", "before.0", "before.1", "after"]

    def turn(self, x: Tensor, order: str) -> Tensor:
        losses = [self.after(self.tracker(self.before(x) if kind == "h" else x)).pow(2).mean() for kind in order]
        return torch.stack(losses).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.turn(batch[0], self.order)

    def on_train_batch_end(self, *args: Any) -> None:
        self.means.append(self.tracker.mean.sum().item())


@habit(plain=False, shows=False)
class SpectralNormOnTwoStages(WrittenOnOneStageOfTwo):
    def make(self) -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class WritesIntoViews(Layers):
    """Rows and aliases of a buffer that every rank has until then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4, WIDTH))
        self.seen: list[Any] = []

    def write(self, hidden: Tensor, labels: Tensor, index: int) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.features(x)
        self.write(hidden.detach(), y, batch_idx)
        return F.cross_entropy(self.head(hidden + 0.01 * self.bank[y % 4]), y)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(self.bank.sum(1).tolist())


VIEWS = ["seen", "bank"]


@habit(observed=VIEWS, plain=False)
class RowOfBufferAddedTo(WritesIntoViews):
    def write(self, hidden: Tensor, labels: Tensor, index: int) -> None:
        self.bank[index % 4] += hidden.sum(0)


@habit(observed=VIEWS, plain=False)
class RowsByClass(WritesIntoViews):
    def write(self, hidden: Tensor, labels: Tensor, index: int) -> None:
        for label in range(CLASSES):
            self.bank[label].mul_(0.9).add_(hidden[labels == label].sum(0), alpha=0.1)


@habit(observed=VIEWS, plain=False)
class BufferFollowsByData(WritesIntoViews):
    def write(self, hidden: Tensor, labels: Tensor, index: int) -> None:
        self.bank.data.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        self.bank.data.copy_(self.bank / (1 + self.bank.norm()))


@habit(observed=VIEWS, plain=False)
class RowsUnbound(WritesIntoViews):
    def write(self, hidden: Tensor, labels: Tensor, index: int) -> None:
        rows = self.bank.unbind(0)
        rows[0].add_(hidden.mean(0))
        rows[1].add_(rows[0])
        self.bank.mul_(0.5)
        self.seen.append(rows[1].sum().item())


@habit(observed=VIEWS, plain=False)
class OlderRowsOfWrittenBuffer(WritesIntoViews):
    """Views that were made before the buffer itself was written into see that."""

    def write(self, hidden: Tensor, labels: Tensor, index: int) -> None:
        row, further = self.bank[0], self.bank[1] + 1
        self.bank.add_(hidden.mean(0))
        self.seen.append(row.sum().item())
        row += further
        self.bank[2] = row * 2


@habit(observed=VIEWS, plain=False)
class PartsOfBufferWritten(WritesIntoViews):
    def write(self, hidden: Tensor, labels: Tensor, index: int) -> None:
        self.bank[2:, :4].copy_(hidden[:2, 4:])
        self.bank[:2] = hidden[:2]
        torch.mul(self.bank[3], hidden.mean(), out=self.bank[3])
        self.bank.T[1].add_(hidden.std())
        self.bank.view(-1)[8:12] -= hidden[0, :4]
        alias = self.bank.detach()
        alias[0].mul_(hidden.max())
        self.seen.append(alias.sum().item())


@habit(expect=error(SHARED), plain=False, shows=False)
class RowsKeptSinceInit(WritesIntoViews):
    """These would not see the write, as stages get the buffer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = list(self.bank)

    def write(self, hidden: Tensor, labels: Tensor, index: int) -> None:
        self.bank += hidden.mean(0)


@habit(expect=error(SHARED), plain=False, shows=False)
class ArrayOfWrittenRow(WritesIntoViews):
    def write(self, hidden: Tensor, labels: Tensor, index: int) -> None:
        array = self.bank.numpy()
        self.bank[0] += hidden.mean(0)
        self.seen.append(float(array.sum()))


class Average(nn.Module):
    """Keeps an average of what it is given, without cutting it off from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.require_grad: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x.mean(0))
        self.require_grad.append(self.average.requires_grad)
        return x + self.average

    def keep(self, mean: Tensor) -> None:
        raise NotImplementedError


class KeepsAverage(Layers):
    average: Any

    def __init__(self) -> None:
        super().__init__()
        self.between = self.average()

    def chain(self) -> list[str]:
        return ["layers.0", "layers.1", "between", "layers.2", "layers.3"]

    def features(self, x: Tensor) -> Tensor:
        x = self.between(self.layers[1](self.layers[0](x)))
        return self.layers[3](self.layers[2](x))


KEPT = ["between.require_grad", "between.average"]


@habit(observed=KEPT, shows=False)
class AverageByData(KeepsAverage):
    """``.data`` is what keeps the average out of the graph, whose last step is gone when it is used again."""

    class average(Average):
        def keep(self, mean: Tensor) -> None:
            self.average.data.lerp_(mean, 0.1)


@habit(observed=KEPT, shows=False)
class AverageByParts(KeepsAverage):
    """Of an alias, which is in the graph then."""

    class average(Average):
        def keep(self, mean: Tensor) -> None:
            alias, other = self.average.detach(), self.average.data
            alias[: WIDTH // 2] = mean[: WIDTH // 2]
            self.average.data.mul_(0.9).add_(mean, alpha=0.1)
            self.require_grad += [alias.requires_grad, other.requires_grad, self.average.data[0].requires_grad]


@habit(observed=KEPT, shows=False)
class AsksForGradientsOfBuffers(KeepsAverage):
    """As a codebook does whose average may have been put into them."""

    class average(Average):
        def keep(self, mean: Tensor) -> None:
            if self.average.grad is not None:
                mean = mean + self.average.grad
                self.average.grad = None
            self.average.data.lerp_(mean, 0.1)
