"""Small modules with habits that steps have: what they do between the layers is nothing unusual in plain PyTorch."""

from __future__ import annotations

import operator
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.lit import Block, Lit, Stack


class CachesMask(Stack):
    """A mask is made in the first call, before the cut, and kept for all others."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def through(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(16).cumsum(0) / 16
        for block in self.blocks:
            x = block(x) * self.mask
        return x


class CountsCalls(Stack):
    """A counter of calls is in the result, and hooks collect what the end of the step empties again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.features: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, args, output: self.features.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * self.calls)
        loss = loss + 0.01 * torch.stack([feature.pow(2).mean() for feature in self.features]).sum()
        self.features.clear()
        return loss


class Remembering(Block):
    """Adds what it gave for the batch before."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.memory is not None:
            x = x + 0.1 * self.memory.mean()
        self.memory = x.detach()
        return x


class KeepsState(Stack):
    """Layers with a memory, and a buffer that each step replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Remembering() for _ in self.blocks])
        self.register_buffer("center", torch.zeros(16))

    def through(self, x: Tensor) -> Tensor:
        self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)
        return super().through(x - self.center)


class UnpacksTensors(Stack):
    """Tensors are unpacked, iterated over, and put together again."""

    def through(self, x: Tensor) -> Tensor:
        first, second = x.view(x.shape[0], 2, 8).unbind(1)
        left, right = torch.stack([first, second])
        x = torch.cat([left, right], -1)
        for block in self.blocks:
            x = torch.stack([row * (1 + 0.1 * i) for i, row in enumerate(block(x))])
        return x


OPERATORS: tuple[Callable[[Any, Any], Any], ...] = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
)


class OperatesOnBuffers(Stack):
    """Between blocks every operator has a module's own tensor, or a number, on one of its sides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.linspace(0.5, 1.5, 16))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            near = x.detach().abs() + 1
            own: Any
            for own in (self.level, 2.0):
                sides = [found for apply in OPERATORS for found in (apply(own, near), apply(near, own))]
                x = x + 0.01 * torch.stack([side.float() for side in sides]).mean(0)
            flags = near > self.level
            x = torch.where((self.level < 1) & flags | (self.level > near) ^ flags, x, self.level @ near.T @ near)
        return x


Pair = namedtuple("Pair", ["main", "side"])


@dataclass
class State:
    x: Tensor
    sides: list[Tensor]
    names: dict[str, Tensor]


class Passing(Block):
    """Takes and returns nested values."""

    def forward(self, pair: Pair, state: State) -> tuple[Pair, State]:  # type: ignore[override]
        main = super().forward(pair.main + 0.1 * pair.side)
        state = State(main, [*state.sides, main.mean(-1)], {**state.names, f"n{len(state.sides)}": main.amax()})
        return Pair(main, pair.side * 0.9), state


class PassesStructures(Stack):
    """Named tuples and dataclasses go from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Passing() for _ in self.blocks])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.embed(x)
        pair, state = Pair(x, x.detach()), State(x, [], OrderedDict())
        for block in self.blocks:
            pair, state = block(pair, state)
        return self.loss(pair.main, y) + 0.1 * torch.stack(state.sides).mean() + 0.01 * sum(state.names.values())


class WithoutGradient(Stack):
    """Half of the layers run without gradients first, for a target; numbers go through numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(Block(), Block())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.embed(x)
        with torch.no_grad():
            target = self.teacher(x)
            scale = float(target.abs().numpy().max())
        hidden = self.through(x)
        with torch.no_grad():
            weights = torch.from_numpy(hidden.detach().numpy().copy()).softmax(-1)
        return self.loss(hidden, y) + F.mse_loss(hidden * weights, target / (1 + scale))


class TorchTransformer(Lit):
    """nn.TransformerEncoder and nn.TransformerDecoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 4, norm=nn.LayerNorm(16))
        decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(decoder, 4)
        self.head = nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.embed(x).unsqueeze(1) * torch.linspace(0.5, 1, 5).view(1, 5, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        memory = self.encoder(x, mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.decoder(x, memory, tgt_mask=mask).mean(1)), y)


class OneSequential(Lit):
    """The whole model is an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU(inplace=True))]
        self.net = nn.Sequential(*layers, nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class RecordsRanges(Stack):
    """Ranges for a profiler, one of which a boundary lies in."""

    def through(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("blocks"):
            for number, block in enumerate(self.blocks):
                with torch.autograd.profiler.record_function(f"block {number}"):
                    x = block(x) + 1
        return x


def as_traced(graph: torch.fx.GraphModule, _: Any) -> Any:
    """A compiler that runs the graph it is given, and counts how often."""

    def run(*args: Any) -> Any:
        as_traced.calls += 1  # type: ignore[attr-defined]
        return graph(*args)

    return run


as_traced.calls = 0  # type: ignore[attr-defined]


class CompiledBlocks(Stack):
    """Each block is compiled, in a wrapper or in its place."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            if number % 2:
                block.compile(backend=as_traced)
            else:
                self.blocks[number] = torch.compile(block, backend=as_traced)

    def on_train_end(self) -> None:
        assert as_traced.calls, "nothing ran compiled"  # type: ignore[attr-defined]


class CompiledWhole(OneSequential):
    """A network that is compiled as one, and has to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend=as_traced)


class Recurrent(Lit):
    """LSTMs, whose results are tuples, and weights with a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(8, 8, batch_first=True) for _ in range(4)])
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.unsqueeze(1).repeat(1, 3, 1)
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return F.cross_entropy(self.head(x[:, -1] + state[0][0]), y)


class SharesLayers(Stack):
    """Blocks that share an activation and a norm; keys name layers inside of them."""

    def __init__(self) -> None:
        super().__init__()
        act, norm = nn.ReLU(), nn.LayerNorm(16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), act, norm) for _ in self.blocks])


class EarlyFeatures(Stack):
    """Validation and prediction return before the last stages are reached."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("early", self.features(batch).pow(2).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        features = self.features(batch)
        return {"features": features, "norm": features.norm(dim=-1)}

    def features(self, batch: Any) -> Tensor:
        return self.blocks[1](self.blocks[0](self.embed(batch[0])))


class Branches(Stack):
    """What the data says decides which layers run, in either of two branches before and after the cut."""

    def through(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if x.mean() > 0 or i % 2:
                x = block(x)
            elif x.std() > 1:
                x = x / 2
        return x
