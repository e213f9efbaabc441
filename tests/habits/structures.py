"""Structures: of batches, arguments and results."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Layer, Layers, Noting
from tests.habits.table import habit


@habit(without={"weight": 0.0})
class ReturnsDictionaries(Layers):
    """Layers take tensors and return dictionaries with more than one tensor."""

    weight = 0.1

    class Telling(Layer):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return {"out": y, "energy": y.pow(2).mean(-1), "in": x}

    layer = Telling

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        energies = []
        for layer in self.layers:
            found = layer(x)
            x = found["out"] + 0.1 * found["in"]
            energies.append(found["energy"])
        return F.cross_entropy(self.head(x), y) + self.weight * torch.stack(energies).mean()


@dataclass
class State:
    """What goes from layer to layer."""

    x: Tensor
    depth: int = 0
    mask: Tensor | None = None
    trace: list[Tensor] = field(default_factory=list)


@habit()
class PassesDataclass(Layers):
    """A dataclass is changed in place by some layers, and replaced by others."""

    class Passing(Layer):
        def forward(self, state: State) -> State:  # type: ignore[override]
            state.depth += 1
            state.trace.append(state.x.mean())
            x = super().forward(state.x) / state.depth
            if state.depth % 2:
                return replace(state, x=x, mask=x.detach() > 0)
            state.x = x if state.mask is None else x * (0.5 + state.mask)
            return state

    layer = Passing

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        state = State(x)
        for layer in self.layers:
            state = layer(state)
        return F.cross_entropy(self.head(state.x), y) + 0.1 * torch.stack(state.trace).sum() * state.depth


Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    pair: Pair
    steps: int


@habit()
class PassesNamedTuples(Layers):
    """Named tuples within named tuples, with a number."""

    class Passing(Layer):
        def forward(self, typed: Typed) -> Typed:  # type: ignore[override]
            pair = typed.pair
            return Typed(pair._replace(left=super().forward(pair.left), right=pair.right * 0.9), typed.steps + 1)

    layer = Passing

    def features(self, x: Tensor) -> Tensor:
        typed = Typed(Pair(x, x.flip(1)), 0)
        for layer in self.layers:
            typed = layer(typed)
        return typed.pair.left + typed.pair.right / typed.steps


@habit()
class TuplesWithNone(Layers):
    """Hugging Face's habit: tuples whose entries may be None, shortened by slices."""

    class Optional(Layer):
        def forward(self, x: Tensor, past: Tensor | None = None, use_cache: bool = False) -> Any:
            y = super().forward(x if past is None else x + 0.1 * past)
            return (y, y.detach() if use_cache else None, None)[: 2 + use_cache]

    layer = Optional

    def features(self, x: Tensor) -> Tensor:
        past = None
        for number, layer in enumerate(self.layers):
            x, past, *rest = layer(x, past=past, use_cache=number % 2 == 0)
            assert rest in ([], [None])
        return x


@habit()
class NestedLists(Layers):
    """A pyramid: lists of lists of tensors of several sizes go through all layers."""

    class Passing(Layer):
        def forward(self, levels: list[Any]) -> list[Any]:  # type: ignore[override]
            x, rest = levels
            return [super().forward(x), [*rest, [x[:, : WIDTH - len(rest)], (x.mean(),)]]]

    layer = Passing

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        levels: list[Any] = [x, []]
        for layer in self.layers:
            levels = layer(levels)
        widths = [level.shape[-1] for level, _ in levels[1]]
        extra = sum(level.pow(2).mean() + mean for level, (mean,) in levels[1]) / sum(widths)
        return F.cross_entropy(self.head(levels[0]), y) + extra


@habit()
class KeywordsOnly(Layers):
    """Arguments by keyword only, passed on by **kwargs, with plain values among them."""

    class Keyword(Layer):
        def forward(self, *, x: Tensor, scale: float = 1.0, mask: Tensor | None = None, **extra: Any) -> Tensor:
            y = super().forward(x) * scale
            return y if mask is None else y * mask + extra["shift"]

    layer = Keyword

    def features(self, x: Tensor) -> Tensor:
        mask = (x.detach() > -1).float()
        kwargs = {"mask": mask, "shift": 0.1}
        for number, layer in enumerate(self.layers):
            x = layer(x=x, scale=1 - 0.1 * number, **kwargs)
        return x


@habit()
class TensorsAsDefaults(Layers):
    """Tensors as default arguments, as class attributes and as globals."""

    class Defaulting(Layer):
        ramp = torch.linspace(0.9, 1.1, WIDTH)

        def forward(self, x: Tensor, scale: Tensor = torch.tensor(0.9)) -> Tensor:  # noqa: B008
            return super().forward(x * scale) * self.ramp + OFFSET

    layer = Defaulting


OFFSET = torch.full((WIDTH,), 0.05)


@habit()
class OutputWithAttributes(Layers):
    """An OrderedDict subclass with attributes, as Hugging Face's ModelOutput is."""

    class Output(OrderedDict):
        @property
        def hidden(self) -> Tensor:
            return self["hidden"]

    class Telling(Layer):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return OutputWithAttributes.Output(hidden=super().forward(x), gate=torch.sigmoid(x))

    layer = Telling

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            output = layer(x)
            x = output.hidden * output["gate"]
        return x


@habit(without={"weight": 0.0})
class BatchAsNestedDictionary(Layers):
    """The batch has dictionaries in dictionaries, strings, numbers and lists, some used late."""

    weight = 0.5

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x, y = Layers.batch(generator)
        return {
            "inputs": {"x": x, "scale": torch.rand(SAMPLES, 1, generator=generator)},
            "labels": y,
            "names": [f"sample {i}" for i in range(SAMPLES)],
            "source": "train",
            "weights": [0.5 + 0.1 * i for i in range(SAMPLES)],
            "level": 3,
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["inputs"]["x"] * batch["inputs"]["scale"])
        weight = torch.tensor([len(name) * value for name, value in zip(batch["names"], batch["weights"], strict=True)])
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        factor = self.weight if batch["source"] == "train" else 1.0
        return losses.mean() + factor * (losses * weight).mean() / batch["level"]


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    names: list[str]
    level: int = 2


@habit()
class BatchAsDataclass(Layers):
    """The batch is a dataclass."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x, y = Layers.batch(generator)
        return Sample(x, y, [str(i % 3) for i in range(SAMPLES)])

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        shift = torch.tensor([[float(name)] for name in batch.names])
        return F.cross_entropy(self(batch.x + 0.1 * shift), batch.y) / batch.level


class Words(NamedTuple):
    x: Tensor
    y: Tensor


@habit()
class BatchAsListOfTensors(Layers):
    """A list of a named tuple and a list of three tensors, of which each layer gets its own."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x, y = Layers.batch(generator)
        return [Words(x, y), [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(3)]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, y), extras = batch
        for layer, extra in zip(self.layers, [*extras, None], strict=True):
            x = layer(x if extra is None else x + 0.1 * extra)
        return F.cross_entropy(self.head(x), y)


@habit(without={"scale": 0.0})
class PlainObjectAsArgument(Layers):
    """A configuration object, a function and a module are arguments of layers."""

    scale = 0.1

    class Configured(Layer):
        def forward(self, x: Tensor, config: Any, function: Any, norm: nn.Module) -> Tensor:  # type: ignore[override]
            return norm(super().forward(x)) + config.scale * function(x)

    layer = Configured

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"scale": self.scale})()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def features(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.config, torch.sin if number % 2 else torch.cos, self.norm)
        return x


@habit()
class ComplexAndIntegers(Layers):
    """Complex, integer, boolean and double tensors cross the boundaries."""

    class Mixed(Layer):
        def forward(self, x: Tensor, spectrum: Tensor, counts: Tensor) -> Any:  # type: ignore[override]
            y = super().forward(x) + torch.fft.irfft(spectrum, n=WIDTH)
            return y, torch.fft.rfft(y) * 0.5, counts + (y.detach() > 0).int()

    layer = Mixed

    def features(self, x: Tensor) -> Tensor:
        spectrum, counts = torch.fft.rfft(x), torch.zeros_like(x, dtype=torch.int32)
        for layer in self.layers:
            x, spectrum, counts = layer(x, spectrum, counts)
        return x * (1 + counts.double() / 10).float()


@habit()
class EmptyAndScalar(Layers):
    """Empty tensors, tensors without dimensions, and expanded ones cross the boundaries."""

    class Odd(Layer):
        def forward(self, x: Tensor, empty: Tensor, level: Tensor, wide: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x) + level * wide + empty.sum(), empty, level * 0.9, wide

    layer = Odd

    def features(self, x: Tensor) -> Tensor:
        empty, level, wide = x.new_zeros(0, WIDTH), torch.tensor(0.5), torch.ones(1).expand(len(x), WIDTH)
        for layer in self.layers:
            x, empty, level, wide = layer(x, empty, level, wide)
        return x


@habit()
class GeneratorOfTensors(Layers):
    """Layers are driven by a generator function that yields hidden values."""

    def hidden(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            yield x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        *early, last = self.hidden(x)
        return F.cross_entropy(self.head(last), y) + 0.1 * sum(value.pow(2).mean() for value in early)


@habit()
class MethodsOfSubmodules(Layers):
    """Submodules are used by methods other than forward, and by their parameters' attributes."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(4)])
            self.out = nn.Linear(WIDTH, CLASSES)

        def encode(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        def classify(self, x: Tensor) -> Tensor:
            return x @ self.out.weight.T + self.out.bias

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.encoder = self.Encoder()

    def chain(self) -> list[str]:
        return [f"encoder.layers.{i}" for i in range(4)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.encoder.classify(self.encoder.encode(x)), y)


@habit(without={"learned": False})
class CrossAttention(Layers):
    """An encoder-decoder: the encoder's output is used by each later layer; queries are a parameter of the module."""

    learned = True

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, WIDTH), requires_grad=self.learned)
        self.decoder = nn.ModuleList([nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(4)])

    def chain(self) -> list[str]:
        return [*super().chain(), *(f"decoder.{i}" for i in range(4))]

    def features(self, x: Tensor) -> Tensor:
        memory = super().features(x.unsqueeze(1) * torch.linspace(0.5, 1, 4)[None, :, None])
        queries = self.queries.expand(len(x), -1, -1)
        for attention in self.decoder:
            found, weights = attention(queries, memory, memory)
            queries = queries + found * weights.sum(-1, keepdim=True)
        return queries.mean(1)


@habit(observed=["kept"])
class LazilyConjugated(Layers):
    """Tensors whose memory is that of their conjugate, or of their negative, cross the boundaries and are kept."""

    class Turned(Layer):
        def forward(self, x: Tensor, turned: Tensor, negative: Tensor) -> Any:  # type: ignore[override]
            y = super().forward(x) + turned.real + negative
            spectrum = torch.complex(y, y.sin()).conj()
            return y, spectrum, spectrum.imag

    layer = Turned

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def features(self, x: Tensor) -> Tensor:
        turned, negative = torch.complex(x, x), torch.zeros_like(x)
        for layer in self.layers:
            x, turned, negative = layer(x, turned, negative)
        total = turned.sum().conj().detach()
        self.kept = [turned.detach(), negative.detach(), total, total.imag]
        return x


@habit()
class OneStridedElement(Layers):
    """A single number that keeps the stride of what it was taken from, as an index gives it, and a buffer like it."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.arange(20.0)[1::2][:1] / 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.layers[1](self.layers[0](x))
        one = x[:1, ::2][0, :1]  # stride 2
        x = self.layers[3](self.layers[2](x)) * one + self.offset
        return F.cross_entropy(self.head(x), y)


@habit()
class AttributesOfFeatures(Layers):
    """Features carry numbers and texts of the user's, by names that are short and common, and a value as critics do."""

    def features(self, x: Tensor) -> Any:
        early: Any = self.layers[1](self.layers[0](x))
        early.value, early.what, early.recording = 2, "early", 0.5
        late: Any = self.layers[2](early)
        late.value, late.spec = late.mean(1, keepdim=True), {"size": WIDTH}
        late = self.layers[3](late + early * early.value * early.recording + late.value * len(late.spec))
        late.value, late.recording = 3, 0.1
        return late + early * len(early.what) * late.recording / late.value


class Marked(Layers):
    """Parameters have attributes from the beginning on."""

    def __init__(self) -> None:
        super().__init__()
        for number, (name, p) in enumerate(self.named_parameters()):
            marked: Any = p
            marked.what = "slow" if p.dim() == 1 else "fast"
            marked.value, marked.spec, marked.recording = 0.5 + 0.1 * number, (name, number), number % 3


@habit()
class AttributesOfParameters(Marked):
    """They tell the optimizer's groups, what hooks do to gradients, and a weight of the loss, by common names."""

    def configure_optimizers(self) -> Any:
        groups: dict[str, list[Any]] = {"slow": [], "fast": []}
        for p in self.parameters():
            groups[p.what].append(p)
        return torch.optim.SGD([{"params": groups["slow"], "lr": 0.01}, {"params": groups["fast"]}], lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights: list[Any] = [self.layers[0].linear.weight, self.layers[3].linear.weight, self.head.bias]
        return super().training_step(batch, batch_idx) * sum(weight.value for weight in weights)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            marked: Any = p
            marked.grad *= marked.value * len(marked.spec) / (1 + marked.recording)


@habit(observed=["found"])
class AsksWhoHasAttributes(Noting):
    """Code that takes tensors or what wraps one asks which it got, and whether parameters have been marked."""

    NAMES = ("value", "spec", "recording", "what")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h: Any = self.features(x)
        h = h.value if hasattr(h, "value") else h * 0.5
        self.found.append([getattr(x, name, None) or getattr(h, name, "none") for name in self.NAMES])
        return F.cross_entropy(self.head(h), y)

    def on_train_epoch_end(self) -> None:
        self.found.append([hasattr(p, name) for p in self.parameters() for name in self.NAMES])
        for number, p in enumerate(self.parameters()):
            marked: Any = p
            marked.value, marked.what = number, 2
        self.found.append(sum(p.value * p.what for p in self.parameters()))  # type: ignore[misc]
        self.found.append(float(sum(p.detach().sum() for p in self.parameters())))
