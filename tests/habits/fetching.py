"""What the code of a loader leaves behind in Python, where steps and hooks find it."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, default_collate

from tests.habits.loaders import OwnLoader, samples
from tests.habits.modules import CLASSES, WIDTH
from tests.habits.table import error, habit

GENERATOR = np.random.default_rng(5)
FETCHED: list[int] = []


class Fetches(OwnLoader):
    """Scales its loss by what `figure` says, and sets the rate of learning by it."""

    def figure(self) -> float:
        return 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + 0.01 * self.figure())
        self.log("figure", self.figure())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.1 / (1 + 0.1 * self.figure())

    def train_dataloader(self) -> Any:
        return DataLoader(samples(24, 1), batch_size=8, shuffle=True)


@habit(plain=False, shows=False, observed=["figures"])
class GeneratorOfSampler(Fetches):
    """The generator given to the sampler is drawn from in steps and hooks, too."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.figures: list[float] = []

    def train_dataloader(self) -> Any:
        data = samples(24, 1)
        return DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=self.generator))

    def figure(self) -> float:
        return self.figures[-1] if self.figures else 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x + 0.1 * torch.rand(x.shape, generator=self.generator), y), batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.figures.append(float(torch.rand((), generator=self.generator)))
        super().on_train_batch_end()


class Noisy(TensorDataset):
    """Draws from generators of its own, and from the file's."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.own, self.python = np.random.default_rng(3), random.Random(4)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + float(self.own.normal() + self.python.random() + GENERATOR.normal()), y


@habit(plain=False, shows=False)
class GeneratorsOfDataset(Fetches):
    """Generators of numpy and Python that a dataset draws from are the module's as well."""

    def __init__(self) -> None:
        super().__init__()
        global GENERATOR
        GENERATOR = np.random.default_rng(5)
        self.data = Noisy(*samples(24, 1).tensors)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8)

    def figure(self) -> float:
        return float(self.data.own.random() + self.data.python.random() + GENERATOR.random())


class Counting(TensorDataset):
    """Notes what is fetched, in every way."""

    calls = 0
    made = 0

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.order: list[int] = []
        self.recent: deque[int] = deque(maxlen=5)
        self.seen: set[int] = set()
        self.of_class: Counter[int] = Counter()
        self.by_class: dict[int, list[int]] = defaultdict(list)
        self.times, self.visits = np.zeros(len(self), dtype=int), torch.zeros(len(self))
        self.last: Fetched | None = None
        Counting.made = 0
        FETCHED.clear()

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        self.calls += 1
        Counting.made += 1
        self.order.append(index)
        self.recent.append(index)
        self.seen.add(index)
        self.of_class[int(y)] += 1
        self.by_class[int(y)].append(index)
        self.times[index] += 1
        self.visits[index] += 1
        self.last = Fetched(index, x.numpy().copy())
        FETCHED.append(index)
        return x, y


@dataclass
class Fetched:
    index: int
    values: Any


OF_COUNTING = ("calls", "made", "order", "recent", "seen", "of_class", "by_class", "times", "visits", "last")


@habit(plain=False, shows=False, observed=[f"data.{name}" for name in OF_COUNTING])
class DatasetCounts(Fetches):
    """A dataset counts on itself, on its class and in a global; steps and hooks read it, and one ends the training."""

    def __init__(self) -> None:
        super().__init__()
        self.data = Counting(*samples(24, 1).tensors)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8, shuffle=True)

    def figure(self) -> float:
        data = self.data
        assert len(FETCHED) == data.calls == data.made == len(data.order)
        assert not data.last or data.last.index == FETCHED[-1]
        return data.calls + len(data.seen) + float(data.times.max() + data.visits.max())

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        if self.data.calls >= 40:
            self.trainer.should_stop = True


@habit(plain=False, shows=False, observed=["collated", "sums"])
class CollateKeeps(Fetches):
    """A collate function counts in a variable of the function that it was made in, and keeps what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.collated = 0
        self.sums: list[float] = []

    def train_dataloader(self) -> Any:
        count = 0

        def collate(batch: Any) -> Any:
            nonlocal count
            count += 1
            x, y = default_collate(batch)
            self.collated, self.sums = count, [*self.sums, float(x.sum())]
            return x, y

        return DataLoader(samples(24, 1), batch_size=8, collate_fn=collate)

    def figure(self) -> float:
        return self.collated + sum(self.sums)


class Through(TensorDataset):
    """Passes samples through the module's first layer."""

    def __init__(self, module: Any) -> None:
        super().__init__(*samples(24, 1).tensors)
        self.module = module

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        self.module.passes += 1
        with torch.no_grad():
            return self.module.layers[0](x[None])[0], y


@habit(plain=False, shows=False, observed=["passes"])
class DatasetUsesLayer(Fetches):
    """A dataset computes with a layer of the first stage, and counts on the module."""

    passes = 0

    def train_dataloader(self) -> Any:
        return DataLoader(Through(self), batch_size=8)

    def figure(self) -> float:
        return float(self.passes)


class Sized:
    """Batches of other sizes and orders each time."""

    def __init__(self) -> None:
        self.epoch, self.sizes = 0, list[int]()

    def __iter__(self) -> Any:
        for _ in range(3):
            self.sizes.append(random.randint(5, 8) + self.epoch)
            yield np.random.permutation(24)[: self.sizes[-1]].tolist()
        self.epoch += 1

    def __len__(self) -> int:
        return 3


@habit(plain=False, shows=False, observed=["sampler.epoch", "sampler.sizes"], epochs=3)
class BatchSamplerCounts(Fetches):
    """A batch sampler draws between batches, and keeps the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = Sized()

    def train_dataloader(self) -> Any:
        return DataLoader(samples(24, 1), batch_sampler=self.sampler)

    def figure(self) -> float:
        return float(sum(self.sampler.sizes) + self.sampler.epoch)


class Stream(IterableDataset[Any]):
    """As long as it happens to be."""

    given = 0

    def __iter__(self) -> Any:
        for _ in range(18 + random.randint(0, 5)):
            self.given += 1
            yield torch.randn(WIDTH) + random.random(), int(np.random.randint(CLASSES))


@habit(plain=False, shows=False, observed=["stream.given"], epochs=3)
class StreamCounts(Fetches):
    """A stream of an unknown length, of which a batch is fetched ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()

    def train_dataloader(self) -> Any:
        return DataLoader(self.stream, batch_size=6)

    def figure(self) -> float:
        return float(self.stream.given)


class Normalised(Fetches):
    """Keeps the mean of what was fetched, and takes it from what the last layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def keep(self, mean: Tensor) -> None:
        raise NotImplementedError

    def collate(self, samples: Any) -> Any:
        x, y = default_collate(samples)
        self.keep(x.mean(0))
        return x, y

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.mean[:CLASSES]

    def figure(self) -> float:
        return float(self.mean.sum())

    def train_dataloader(self) -> Any:
        return DataLoader(samples(24, 1), batch_size=8, collate_fn=self.collate)


@habit(plain=False, shows=False)
class BufferMadeAnew(Normalised):
    """A new tensor for the buffer with every batch."""

    def keep(self, mean: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * mean


@habit(plain=False, shows=False)
class TensorWritten(Normalised):
    """A tensor that is no buffer is written into."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.mean = torch.zeros(WIDTH)

    def keep(self, mean: Tensor) -> None:
        self.mean.mul_(0.9).add_(mean, alpha=0.1)


@habit(expect=error(r"a write into mean changes.*code of a loader.*in a step or in a hook"), plain=False, shows=False)
class BufferWritten(Normalised):
    """The buffer is written into."""

    def keep(self, mean: Tensor) -> None:
        self.mean.mul_(0.9).add_(mean, alpha=0.1)


class Episodes(torch.utils.data.Dataset[Any]):
    """A dataset that collects what it gives out, in lists that change places."""

    def __init__(self) -> None:
        self.samples = samples(24, 1)
        self.now: list[float] = [1.0]
        self.before: list[float] = [2.0, 3.0]
        self.total = 0.0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.collect(index)
        return self.samples[index]

    def collect(self, index: int) -> None:
        raise NotImplementedError


class Begun(Episodes):
    """The list is begun anew when an episode of five ends, as in Lightning's PPO."""

    def collect(self, index: int) -> None:
        self.now.append(index)
        if len(self.now) == 5:
            self.total += sum(self.now)
            self.now = []


class KeptByAnotherName(Episodes):
    """The list of the batch before gets another name."""

    def collect(self, index: int) -> None:
        if index % 8 == 0:
            self.before, self.now = self.now, []
        self.now.append(index)


class Exchanged(Episodes):
    """Two lists change places, and the one that comes is added to."""

    def collect(self, index: int) -> None:
        if index % 8 == 0:
            self.now, self.before = self.before, self.now
            self.now.append(index / 10)


class CollectsEpisodes(Fetches):
    """Scales its loss by what the dataset has collected."""

    episodes: type[Episodes] = Episodes

    def __init__(self) -> None:
        super().__init__()
        self.data = self.episodes()

    def figure(self) -> float:
        return len(self.data.now) + sum(self.data.now) / 10 + sum(self.data.before) / 100

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8)


@habit(plain=False, shows=False, observed=["data.now", "data.before", "data.total"])
class EpisodesBegunAnew(CollectsEpisodes):
    episodes = Begun


@habit(plain=False, shows=False, observed=["data.now", "data.before"])
class EpisodesBefore(CollectsEpisodes):
    episodes = KeptByAnotherName


@habit(plain=False, shows=False, observed=["data.now", "data.before"])
class EpisodesExchanged(CollectsEpisodes):
    episodes = Exchanged
