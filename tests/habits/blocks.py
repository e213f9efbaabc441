"""Blocks whose forward only computes, so that calls are answered without their Python, until something is different."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import WIDTH, Evaluated, Layers
from tests.habits.table import habit

GAIN = 1.0


def gained(x: Tensor) -> Tensor:
    return x * GAIN


class Block(nn.Module):
    """A residual block in the manner of users' own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.rate, self.scale = F.gelu, 0.0, 1.0

    def branch(self, x: Tensor) -> Tensor:
        return self.outer(self.act(self.inner(self.norm(x))))

    def forward(self, x: Tensor, shift: Tensor | None = None, *others: Tensor) -> Tensor:
        y = self.branch(x) if shift is None else self.branch(x + shift)
        for other in others:
            y = y + other
        y = F.dropout(y, self.rate, self.training)
        return x + gained(y) * self.scale


class Blocks(Layers):
    layer = Block


@habit(plain=False, without={"rate": 1.0})  # the hook runs once a micro-batch
class ScaleFalls(Blocks):
    """A number on each block is set anew in a hook after every batch."""

    rate = 0.9

    def on_train_batch_end(self, *_: Any) -> None:
        for block in self.layers:
            block.scale *= self.rate


@habit(without={"rate": 1.0})
class ScaleFallsInTheStep(Blocks):
    """The same within the step, so that micro-batches differ."""

    rate = 0.9

    def features(self, x: Tensor) -> Tensor:
        for block in self.layers:
            block.scale *= self.rate
        return super().features(x)


@habit(plain=False, without={"later": 0.0})  # drops others
class BlocksDropLater(Blocks):
    """Blocks begin to drop in the second epoch."""

    later = 0.5

    def on_train_epoch_start(self) -> None:
        for block in self.layers:
            block.rate = self.later if self.current_epoch else 0.0


@habit(without={"later": F.gelu})
class ActivationSwapped(Blocks):
    """Blocks have another function in the second epoch."""

    later = staticmethod(F.relu)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            for block in self.layers:
                block.act = self.later


@habit(without={"later": 1.0})
class GlobalOfTheFile(Blocks):
    """A global that a function of the file reads is changed in the second epoch."""

    later = 0.5

    def on_train_epoch_start(self) -> None:
        global GAIN
        GAIN = self.later if self.current_epoch else 1.0

    def on_train_end(self) -> None:
        global GAIN
        GAIN = 1.0


@habit(without={"hooked": False})
class HookOnABlockLater(Blocks):
    """A hook on a part of a block, from the second epoch on."""

    hooked = True

    def on_train_epoch_start(self) -> None:
        if self.current_epoch and self.hooked:
            for block in self.layers:
                block.norm.register_forward_hook(lambda module, inputs, output: output * 0.5)


@habit(without={"frozen": False})
class BlockFrozenLater(Blocks):
    """A part of the first block is frozen in the second epoch."""

    frozen = True

    def on_train_epoch_start(self) -> None:
        if self.current_epoch and self.frozen:
            self.layers[0].inner.requires_grad_(False)


@habit(without={"method": None})
class MethodReplaced(Blocks):
    """A block gets a method of its own in the second epoch."""

    method: Any = staticmethod(lambda x: x * 0.5)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch and self.method is not None:
            self.layers[0].branch = self.method

    def on_train_end(self) -> None:
        vars(self.layers[0]).pop("branch", None)


@habit()
class BlocksOfSeveralArguments(Blocks):
    """Blocks are given what others have made, by name and by place, the same twice."""

    def features(self, x: Tensor) -> Tensor:
        first = x
        for number, layer in enumerate(self.layers):
            x = layer(x, shift=first) if number % 2 else layer(x, first, x, first)
        return x


@habit()
class BlocksOfKeptResults(Blocks):
    """Results of blocks are kept, logged and returned."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x.detach())
        loss = F.cross_entropy(self.head(x), y)
        self.log("size", torch.stack([one.square().mean() for one in kept]).sum())
        return {"loss": loss, "kept": kept[1]}


@habit(without={"from_epoch": 9})
class BlockUnderNoGradLater(Blocks):
    """The first block runs without gradients from the second epoch on."""

    from_epoch = 1

    def features(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.current_epoch < self.from_epoch):
            x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x


@habit(plain=False, calls=["fit", "predict"])  # drops others
class BlocksInEvaluation(Evaluated):
    """Blocks drop in training, and not in validation and prediction."""

    layer = Block

    def on_fit_start(self) -> None:
        for block in self.layers:
            block.rate = 0.3


@habit(without={"factor": 1.0})
class CopiedInTheStep(Blocks):
    """Shallow copies of a block and of a layer are made, changed and called within the step."""

    factor = 0.5

    def features(self, x: Tensor) -> Tensor:
        block, layer = copy.copy(self.layers[1]), copy.copy(self.layers[2].inner)
        block.scale = layer.factor = self.factor
        layer.bias = None
        x = self.layers[1](block(self.layers[0](x)))
        return super().features(layer(x) * layer.factor)


class Attending(nn.Module):
    """Gives its values and its weights, or none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.outer, self.tells = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None, int]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = (q @ k.t() if bias is None else q @ k.t() + bias).softmax(-1)
        y = x + self.outer(weights @ v)
        return y, weights if self.tells else None, len(x)


class Pairs(Blocks):
    layer = Attending
    tells = True

    def features(self, x: Tensor) -> Tensor:
        self.weights = []
        for layer in self.layers:
            layer.tells = self.tells
            x, weights, count = layer(x)
            if weights is not None:
                self.weights.append(weights.square().sum() / count)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(self.weights) if self.tells else loss


@habit(plain=False, without={"tells": False})  # micro-batches attend within themselves
class GivesPairs(Pairs):
    """Blocks give their attention, which is in the loss."""


@habit(plain=False, without={"from_epoch": 5})
class GivesPairsLater(Pairs):
    """From the second epoch on."""

    from_epoch = 1

    @property
    def tells(self) -> bool:  # type: ignore[override]
        return self.current_epoch >= self.from_epoch


@habit(plain=False, observed=["kept"])
class PairsPassedOn(Pairs):
    """The attention of each block biases the next one's, and a hook looks at the last."""

    def features(self, x: Tensor) -> Tensor:
        self.weights, bias = [], None
        for layer in self.layers:
            x, bias, count = layer(x, bias)
            self.weights.append(bias.mean() * count)
        self.last = bias
        return x

    def on_train_batch_end(self, *args: Any) -> None:
        self.kept = [*getattr(self, "kept", []), float(self.last.sum())]


class Swapping(nn.Module):
    """Gives its second argument as it is, or the first twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.linear(x) + x
        if self.times > 1:
            return z, z
        return y, z


@habit(without={"most": 0})
class PairsOfTheSame(Blocks):
    """Of two results one is an argument; from the second epoch on they are one object, which is written into."""

    layer, most = Swapping, 2

    def features(self, x: Tensor) -> Tensor:
        y = x * 0.5
        for layer in self.layers:
            layer.times = self.most if self.current_epoch else 0
            x, y = layer(x, y)
        if x is y:
            x.mul_(2.0)
        return x + y


class Rows(nn.Module):
    """Rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, places: Tensor) -> Tensor:
        return self.table(places).tanh()


class Placed(nn.Module):
    """Adds the rows of a table that it is told, and those after them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows()

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        after = places + 1
        return x + self.rows(places) - 0.5 * self.rows(after)


class Mixing(nn.Module):
    """Blocks that mix the parts of a vector by positions and masks which are made of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.placed = Placed()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.start, self.reach = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x), device=x.device) + self.start
        x = self.placed(x, places)
        mask = torch.tril(torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype), diagonal=1) * self.reach
        for block in self.blocks:
            x = block(x @ mask) / x.shape[-1]
        return x * torch.linspace(1.0, 2.0, x.shape[-1])


class Mixed(Blocks):
    depth, further = 1, 3

    def __init__(self) -> None:
        super().__init__()
        self.mixing = Mixing()

    def chain(self) -> list[str]:
        return ["mixing.placed", *(f"mixing.blocks.{i}" for i in range(4)), "layers.0"]

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.mixing(x))


@habit(plain=False, without={"further": 0})  # positions are those of a micro-batch
class PositionsMovedLater(Mixed):
    """What a whole model makes of numbers alone changes with an attribute in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.mixing.start += self.further
            self.mixing.reach = 0.5


@habit(plain=False, without={"further": 0})
class PositionsGivenByTheStep(Mixed):
    """The module within is called with positions of the step's own on every other batch, before anything else."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if batch_idx % 2:
            x = self.mixing.placed(x, torch.arange(len(x)) + self.further)
        return super().training_step((self.mixing(x), y), batch_idx)


@habit(plain=False, without={"further": 0})
class PositionsGivenAfterwards(Mixed):
    """The module within is called by the step only, with others each time."""

    def features(self, x: Tensor) -> Tensor:
        first = self.mixing(x) if self.global_step % 2 else self.mixing.placed(x, torch.arange(len(x)))
        return self.layers[0](self.mixing.placed(first, torch.arange(len(x)) + self.further * (self.global_step % 4)))


@habit(plain=False, without={"further": 0})
class DefaultDtypeChangesNumbers(Mixed):
    """Numbers become float64 by torch's default in the second epoch."""

    def on_train_epoch_start(self) -> None:
        torch.set_default_dtype(torch.float64 if self.current_epoch and self.further else torch.float32)

    def on_train_epoch_end(self) -> None:
        torch.set_default_dtype(torch.float32)

    def features(self, x: Tensor) -> Tensor:
        return self.layers[0](self.mixing(x).float())


class Named(nn.Module):
    """Adds what it is given by name in that order, and scales by a number that its argument and its weight have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        y = self.outer(torch.tanh(self.inner(x)))
        for other in others.values():
            y = y * 0.5 + other
        return x + y * x.scale * self.outer.bias.scale


class NamedBlocks(Blocks):
    layer = Named
    later: tuple[Any, ...] = ("ab", 1.0, 1.0)

    def features(self, x: Tensor) -> Tensor:
        order, of_argument, of_weight = self.later if self.current_epoch else NamedBlocks.later
        others = {"a": x * 0.3, "b": x * 0.9}
        for layer in self.layers:
            x = x * 1.0
            x.scale, layer.outer.bias.scale = of_argument, of_weight
            x = layer(x, **{name: others[name] for name in order})
        return x


@habit()
class OrderOfNamesChanges(NamedBlocks):
    """Blocks are given the same by name, in another order from the second epoch on."""

    later = ("ba", 1.0, 1.0)


@habit()
class AttributeOfArgumentChanges(NamedBlocks):
    """What blocks are given has a number as an attribute, and so do they, which changes in the second epoch."""

    later = ("ab", 0.5, 1.0)


@habit()
class AttributeOfWeightChanges(NamedBlocks):
    """So does a weight of a block."""

    later = ("ab", 1.0, 0.5)
