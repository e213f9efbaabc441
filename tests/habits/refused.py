"""What is an error by design, and has to say what to do instead."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader

from tests.habits.modules import WIDTH, Layers
from tests.habits.table import error, habit


@habit(expect=error(r"takes a second batch from the dataloader_iter.*num_stages=1"), plain=False, shows=False)
class TakesTwoBatches(Layers):
    """training_step(dataloader_iter), which goes on to the next batch."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        (x, y), _, _ = next(dataloader_iter)
        (other, _), _, _ = next(dataloader_iter)
        return F.cross_entropy(self(x), y) + F.cross_entropy(self(other), y)


@habit(expect=error(r"(?i)rank"), plain=False, shows=False)
class BranchesOnItsRank(Layers):
    """A term that only rank 0 adds: ranks part ways, which is noticed before the update."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[0](x)
        if self.global_rank == 0 and dist.is_initialized():
            hidden = hidden * 1.5
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](self.layers[1](hidden)))), y)


@habit(expect=error(r"one rank alone.*refused\.py:\d+"), plain=False, shows=False)
class BranchesOnRankInHelper(Layers):
    """A method tells whether this is the first rank, and a function asks it, and reads a value there."""

    def is_first(self) -> bool:
        rank = self.global_rank
        return dist.is_initialized() and rank == 0

    def note(self, loss: Tensor) -> None:
        if not self.is_first():
            return
        self.last = loss.item()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.note(loss)
        return loss


@habit(expect=error(r"did not run the same code.*linear at .*depend on the rank"), plain=False, shows=False)
class SharesSamplesOut(Layers):
    """Each rank takes other samples, of another number, and reads the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first = int(os.environ.get("LOCAL_RANK", "0"))
        loss = F.cross_entropy(self(x[first:]), y[first:])
        self.seen = loss.item()
        return loss


@habit(expect=error(r"(?i)differ|rank"), plain=False, shows=False)
class OrderedByIdentity(Layers):
    """Constants that are other ones in each process, as hashes and addresses are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        salt = (id(object()) // 64 + self.global_rank) % 97 if dist.is_initialized() else 0
        return F.cross_entropy(self(x * (1 + salt / 100)), y)


@habit(expect=error(r"(?i)lazy|uninitialized|initiali[sz]e"), plain=False, shows=False)
class LazyLayersLeftUninitialised(Layers):
    """nn.LazyLinear without a first call: optimizers refuse its parameters in one process as well."""

    layer = staticmethod(lambda: nn.LazyLinear(WIDTH))


@habit(expect=error(r"storage_offset tells of the memory.*refused\.py:\d+"), plain=False, shows=False)
class AsksWhereAViewBegins(Layers):
    def features(self, x: Tensor) -> Tensor:
        late = super().features(x)
        return late * (0.5 if late[:, 2:].storage_offset() else 1.0)


@habit(expect=error(r"_base tells of the memory.*refused\.py:\d+"), plain=False, shows=False)
class AsksWhatAViewIsOf(Layers):
    def features(self, x: Tensor) -> Tensor:
        late = super().features(x)
        return late * (0.5 if late[:, 2:]._base is late else 1.0)


@habit(expect=error(r"data_ptr tells of the memory.*x is y.*refused\.py:\d+|refused\.py:\d+.*x is y"), plain=False)
class CachesByAddress(Layers):
    """Results are kept by the addresses of what they were computed from."""

    def features(self, x: Tensor) -> Tensor:
        late = super().features(x)
        cache = {late.data_ptr(): late * 0.5}
        return cache.get(late.data_ptr(), late)


@habit(expect=error(r"_version tells of the memory.*refused\.py:\d+"), plain=False, shows=False)
class CachesByVersion(Layers):
    """A normalised weight is kept until the weight changes."""

    version = -1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.layers[0].linear.weight
        if weight._version != self.version:
            self.version, self.kept = weight._version, F.normalize(weight.detach())
        return super().training_step(batch, batch_idx) + self.kept.sum()


@habit(expect=error(r"the graph of .* cannot be walked.*refused\.py:\d+"), plain=False, shows=False)
class WalksTheGraph(Layers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        node: Any = loss.grad_fn
        return loss * (1 + len(node.next_functions))


@habit(expect=error(r"not positive-definite.*called at .*refused\.py:\d+.*no `try`"), plain=False, shows=False)
class TriesAgainWithJitter(Layers):
    """As Gaussian processes do. torch.linalg.cholesky_ex tells without an error."""

    def features(self, x: Tensor) -> Tensor:
        late = super().features(x)
        covariance, jitter = late @ late.T - torch.eye(len(late)), 0.1
        while True:
            try:
                factor = torch.linalg.cholesky(covariance + jitter * torch.eye(len(late)))
                return late + factor.sum()
            except torch.linalg.LinAlgError:
                jitter *= 2


@habit(expect=error(r"inversion could not be completed.*called at .*refused\.py:\d+"), plain=False, shows=False)
class ReadsWithinTry(Layers):
    """What has failed on one stage is read by all ranks in a `try`."""

    def features(self, x: Tensor) -> Tensor:
        late = super().features(x)
        try:
            return late * torch.inverse(torch.zeros(2, 2) * late[:2, :2]).mean().item()
        except Exception:
            return late * 0.5


@habit(expect=error(r"_base tells of the memory.*refused\.py:\d+"), plain=False, shows=False)
class GoesOnAfterARefusal(Layers):
    def features(self, x: Tensor) -> Tensor:
        late = super().features(x)
        try:
            return late * (0.5 if late[:, 2:]._base is late else 1.0)
        except NotImplementedError:
            return late


@habit(expect=error(r"head\.weight shares its memory with layers\.0\.linear\.weight.*tie"), plain=False)
class TiedByData(Layers):
    """On one stage, or tied as one object, this works."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.data = self.layers[0].linear.weight.data[:4]


@habit(expect=error(r"shares its memory with.*clone"), plain=False, shows=False)
class BuffersAreRowsOfOne(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4, WIDTH))
        for index, layer in enumerate(self.layers):
            layer.register_buffer("row", self.table[index])

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + layer.row
            layer.row.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


@habit(expect=error(r"memory that a tensor of its batch shares with a buffer.*clone"), plain=False, shows=False)
class BufferIsTheBatch(Layers):
    """Training on all data at once, which the module has as a buffer and changes in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("points", torch.randn(8, WIDTH))
        self.labels = torch.arange(8) % 4

    def train_dataloader(self) -> Any:
        return DataLoader([(self.points, self.labels)], batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        late = self.features(x.clone())
        self.points.mul_(0.9)
        return F.cross_entropy(self.head(late + x), y)


@habit(expect=error(r"memory that a tensor of its batch shares with.*clone"), plain=False, shows=False)
class BatchWrittenByAnotherName(Layers):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept = batch[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        late = self.features(x.clone())
        self.kept.mul_(0.9)
        return F.cross_entropy(self.head(late + x), y)


@habit(expect=error(r"earlier one has made.*refused\.py:\d+.*parameter in __init__"), plain=False, shows=False)
class LearnsWhatAMicrobatchHasMade(Layers):
    """A prototype that the first micro-batch makes of its features, and that others have gradients for."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.layers[0](x)
        if not hasattr(self, "prototype"):
            self.prototype = nn.Parameter(x.mean(0))
        x = self.layers[3](self.layers[2](self.layers[1](x)))
        return F.cross_entropy(self.head(x), y) + (x - self.prototype).square().mean()
