"""Where Python keeps state: slots, namespaces, attributes of functions, globals of other modules, iterators."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.habits import counted
from tests.habits.loaders import samples
from tests.habits.modules import Layer, Layers, Noting
from tests.habits.table import error, habit


@dataclass(slots=True)
class Slots:
    count: int = 0


def tally() -> int:
    tally.count += 1  # type: ignore[attr-defined]
    return tally.count  # type: ignore[attr-defined, no-any-return]


class Counts:
    """Counts in an object with slots."""

    def __init__(self) -> None:
        self.state: Any = self.fresh()

    def fresh(self) -> Any:
        return Slots()

    def count(self) -> int:
        self.state.count += 1
        return self.seen()

    def seen(self) -> int:
        return int(self.state.count)


class CountsInNamespace(Counts):
    def fresh(self) -> Any:
        return SimpleNamespace(count=0)


class CountsInFunction(Counts):
    def fresh(self) -> None:
        tally.count = 0  # type: ignore[attr-defined]

    def count(self) -> int:
        return tally()

    def seen(self) -> int:
        return tally.count  # type: ignore[attr-defined, no-any-return]


class CountsInOtherModule(Counts):
    def fresh(self) -> None:
        counted.COUNT = 0

    def count(self) -> int:
        counted.COUNT += 1
        return counted.COUNT

    def seen(self) -> int:
        return counted.COUNT


class CountingDataset(Dataset[Any]):
    def __init__(self, counter: Counts) -> None:
        self.counter = counter
        self.samples = samples(24, 1)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.counter.count()
        return self.samples[index]


class WithCounter(Layers):
    counts: Any = Counts

    def __init__(self) -> None:
        super().__init__()
        self.counter = self.counts()


@habit(plain=False, shows=False)
class CountedByLoader(WithCounter):
    """A dataset counts the samples that it gives, which a hook logs."""

    def train_dataloader(self) -> Any:
        return DataLoader(CountingDataset(self.counter), batch_size=8)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("served", float(self.counter.seen()))


@habit(plain=False, shows=False)
class CountedByLoaderInNamespace(CountedByLoader):
    counts = CountsInNamespace


@habit(plain=False, shows=False)
class CountedByLoaderInFunction(CountedByLoader):
    counts = CountsInFunction


@habit(plain=False, shows=False)
class CountedByLoaderInOtherModule(CountedByLoader):
    counts = CountsInOtherModule


class CountsInStep(WithCounter):
    """The step counts its calls, and computes with their number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.counter.count())


@habit(plain=False, shows=False)
class CountedInStepInFunction(CountsInStep):
    counts = CountsInFunction


@habit(plain=False, shows=False)
class CountedInStepInOtherModule(CountsInStep):
    counts = CountsInOtherModule


class CountsCalls(Layer):
    """Counts the calls of its checkpointed function."""

    counts: Any = Counts

    def __init__(self) -> None:
        super().__init__()
        self.counter = self.counts()

    def inner(self, x: Tensor) -> Tensor:
        self.counter.count()
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@habit(plain=False, shows=False)
class CountedInCheckpoint(Layers):
    layer = CountsCalls

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("calls", float(sum(layer.counter.seen() for layer in self.layers)))  # type: ignore[operator, union-attr]


class CountsCallsInNamespace(CountsCalls):
    counts = CountsInNamespace


@habit(plain=False, shows=False)
class CountedInCheckpointInNamespace(CountedInCheckpoint):
    layer = CountsCallsInNamespace


class TakesFromIterator(Layer):
    """Its checkpointed function takes a factor from an iterator, and another one when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = itertools.cycle([0.9, 1.1, 1.3])

    def inner(self, x: Tensor) -> Tensor:
        return super().forward(x * next(self.factors))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@habit(plain=False, shows=False, expect=error(r"changes TakesFromIterator\.factors, and computes with it.*\.py:\d+"))
class IteratorInCheckpoint(Layers):
    layer = TakesFromIterator


def reverse(x: Tensor) -> Tensor:
    return Reverse.apply(x)  # type: ignore[no-any-return]


reverse.strength = 0.0  # type: ignore[attr-defined]


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -reverse.strength * gradient  # type: ignore[attr-defined, no-any-return]


@habit(plain=False, shows=False, expect=error(r"Reverse uses reverse\.strength, which is another one now.*\.py:\d+"))
class ReversalByFunctionsAttribute(Layers):
    """Gradients are reversed with a strength that grows with each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        reverse.strength = 0.0  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        reverse.strength += 0.1  # type: ignore[attr-defined]
        hidden = reverse(self.layers[1](self.layers[0](batch[0])))
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](hidden))), batch[1])


@habit(plain=False, shows=False, observed=("found",), expect=error(r"backward changes self\.state\.count.*on_before"))
class BackwardCountsInSlots(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.state = Slots()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.state.count += 1
        loss.backward(*args, **kwargs)

    def on_train_batch_end(self, *args: Any) -> None:
        self.found.append(self.state.count)
