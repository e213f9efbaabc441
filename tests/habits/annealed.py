"""What modules return, and the sizes they work on, change from step to step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Layer, Layers
from tests.habits.table import habit


class Cooling(Layer):
    """Returns a temperature that falls with each call."""

    rate = 0.95

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        self.temperature = max(0.5, self.temperature * self.rate)
        return super().forward(x), self.temperature


@habit(without={"layer": type("Constant", (Cooling,), {"rate": 1.0})})
class TemperatureReturned(Layers):
    """Modules return an annealed temperature as a plain number, used after the boundary."""

    layer = Cooling

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, temperature = layer(x)
            x = torch.tanh(x / temperature)
        return x


@habit(observed=["seen"], without={"layer": type("Constant", (Cooling,), {"rate": 1.0})})
class TemperatureUsedAtTheEnd(Layers):
    """The first module's temperature divides the logits on the last stage, and is logged."""

    layer = Cooling

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x, first = self.layers[0](x)
        for layer in self.layers[1:]:
            x, _ = layer(x)
        self.seen.append(first)
        self.log("temperature", first)
        return F.cross_entropy(self.head(x) / first, y)


class Counting(Layer):
    """Says which call it was, as a word."""

    words = ("warm-up", "ramp", "train")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, str]:  # type: ignore[override]
        self.calls += 1
        return super().forward(x), self.words[min(self.calls // 8, 2)]


@habit(observed=["modes"], without={"layer": type("Constant", (Counting,), {"words": ("train",) * 3})})
class ModeReturnedAsString(Layers):
    """A module's mode is a string that changes, and later code branches on it."""

    layer = Counting

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x, mode = layer(x)
        self.modes.append(mode)
        scale = {"warm-up": 0.1, "ramp": 0.5, "train": 1.0}[mode]
        return scale * F.cross_entropy(self.head(x), y)


class Profiling(Layer):
    """Returns a numpy array that it updates."""

    momentum = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.profile = np.ones(WIDTH, dtype=np.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, np.ndarray]:  # type: ignore[override]
        x = super().forward(x)
        self.profile = (1 - self.momentum) * self.profile + self.momentum * x.detach().abs().mean(0).numpy()
        return x, self.profile


@habit(without={"layer": type("Constant", (Profiling,), {"momentum": 0.0})})
class ArrayReturned(Layers):
    """A numpy array of running statistics divides the features after the boundary."""

    layer = Profiling

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, profile = layer(x)
            x = x / torch.from_numpy(profile.copy())
        return x


class Listing(Layer):
    """Returns numbers read from its weight as a list."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[float]]:  # type: ignore[override]
        return super().forward(x), self.linear.bias.tolist()


@habit()
class ListReturned(Layers):
    """`.tolist()` of a trained bias is used on a later stage."""

    layer = Listing

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, numbers = layer(x)
            x = x + 0.1 * max(numbers)
        return x


class Branching(Layer):
    """Returns a dictionary, in an order that changes."""

    swaps = True

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        self.calls += 1
        found = {"main": super().forward(x), "side": 0.5 * torch.sin(x)}
        return dict(reversed(found.items())) if self.swaps and self.calls % 2 else found


@habit(without={"layer": type("Constant", (Branching,), {"swaps": False})})
class DictionaryChangesItsOrder(Layers):
    """The values of a dictionary are weighted by their place in it."""

    layer = Branching

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = sum(value / (1 + place) for place, value in enumerate(layer(x).values()))
        return x


class Growing(Layer):
    """A tensor at first, and a tuple later on."""

    calls = 0
    first = 12

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = super().forward(x)
        return y if self.calls <= self.first else (y, torch.relu(x))


@habit(without={"layer": type("Constant", (Growing,), {"first": 1000})})
class ResultBecomesTuple(Layers):
    """Results change their structure in the second epoch."""

    layer = Growing

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            found = layer(x)
            x = found[0] + 0.1 * found[1] if isinstance(found, tuple) else found
        return x


@habit(without={"epoch": 100})
class ResultGainsKey(Layers):
    """A dictionary goes through all layers and gains an entry from the second epoch on."""

    epoch = 1

    class Passing(Layer):
        def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            x = super().forward(state["x"])
            return {**state, "x": x + 0.1 * state["memory"] if "memory" in state else x}

    layer = Passing

    def features(self, x: Tensor) -> Tensor:
        state = {"x": x}
        if self.current_epoch >= self.epoch:
            state["memory"] = torch.cos(x)
        for layer in self.layers:
            state = layer(state)
        return state["x"]


class Sequences(Layers):
    """Sequences of length 6, with their lengths."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(SAMPLES, 6, WIDTH, generator=generator)
        lengths = torch.randint(2, 7, (SAMPLES,), generator=generator)
        return {"x": x, "lengths": lengths, "y": torch.randint(0, CLASSES, (SAMPLES,), generator=generator)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.features(batch["x"]).mean(1)), batch["y"])


@habit(without={"grows": False})
class CurriculumLengths(Sequences):
    """Longer sequences from epoch to epoch."""

    grows = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        length = 2 + 2 * self.current_epoch if self.grows else 6
        return F.cross_entropy(self.head(self.features(batch["x"][:, :length]).mean(1)), batch["y"])


@habit(plain=False, without={"random_length": False})
class RandomCropLength(Sequences):
    """A crop whose length is drawn by Python's generator."""

    random_length = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        length = random.randint(2, 6) if self.random_length else 6
        return F.cross_entropy(self.head(self.features(batch["x"][:, :length]).mean(1)), batch["y"])


@habit()
class TrimmedToLongest(Sequences):
    """Padding that no sample of the micro-batch needs is cut off."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        longest = int(batch["lengths"].max())
        return F.cross_entropy(self.head(self.features(batch["x"][:, :longest]).mean(1)), batch["y"])


@habit()
class PaddingMasked(Sequences):
    """A mask from lengths is used on every stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.arange(6)[None, :] < batch["lengths"][:, None]
        x = batch["x"]
        for layer in self.layers:
            x = layer(x).masked_fill(~mask[..., None], 0.0)
        return F.cross_entropy(self.head(x.sum(1) / mask.sum(1, keepdim=True)), batch["y"])


@habit()
class TokensUnpadded(Sequences):
    """Only real tokens go through the layers: their number differs from micro-batch to micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.arange(6)[None, :] < batch["lengths"][:, None]
        tokens = self.features(batch["x"][mask])
        owners = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
        pooled = torch.zeros(len(mask), WIDTH).index_add(0, owners, tokens)
        return F.cross_entropy(self.head(pooled), batch["y"])


class Recurrent(nn.Module):
    """A GRU over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return self.gru(packed)[0]


@habit()
class PackedSequences(Sequences):
    """Packed sequences cross the boundaries."""

    layer = Recurrent

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        packed = pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            packed = layer(packed)
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
        return F.cross_entropy(self.head(padded.sum(1) / lengths[:, None]), batch["y"])


@habit()
class SelectedByFeatures(Layers):
    """Rows are chosen by what an early layer says, and the rest is left out of the later ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.layers[1](self.layers[0](x))
        kept = x[:, 0] > -0.5
        x, y = x[kept], y[kept]
        logits = self.head(self.layers[3](self.layers[2](x)))
        return F.cross_entropy(logits, y, reduction="sum") / max(len(y), 1)
