"""Blocks that only compute but for statistics and counters in their buffers, until something is different."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.habits.modules import WIDTH, Evaluated, Layers
from tests.habits.table import habit


class Normed(nn.Module):
    """A residual block with a batch norm, a function in place, and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.relu = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)
        self.outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Hardtanh(inplace=True))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.is_slowing = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.outer(self.relu(self.norm(self.inner(x))))
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        if self.is_slowing:
            y = y / self.calls
        return x + y - 0.1 * self.mean


class Blocks(Layers):
    layer = Normed


@habit(shows=False)
class NormedBlocks(Blocks):
    """They are trained."""


@habit(calls=["fit", "validate", "predict"])
class NormedBlocksInEvaluation(Evaluated):
    """They are evaluated as well, where norms take their statistics from buffers."""

    layer = Normed


@habit(without={"weight": 0.0})
class CountOfANormUsedLater(Blocks):
    """From the second epoch on, how often a norm has been called is in the loss."""

    weight = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch:
            loss = loss * (1 + self.weight * self.layers[1].norm.num_batches_tracked)
        return loss


@habit(without={"weight": 0.0})
class CountOfANormKept(Blocks):
    """From the second epoch on, a view of a norm's count is kept between steps, and used in them."""

    weight = 0.1

    def on_train_epoch_start(self) -> None:
        self.count = self.layers[2].norm.num_batches_tracked.view(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch:
            loss = loss * (1 + self.weight * self.count.float().mean())
        return loss


@habit(observed=["found"])
class CountsRead(Blocks):
    """Counts are read in the step, by themselves and in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.found.append(int(layer.calls) + int(layer.norm.num_batches_tracked))
        self.log("calls", self.layers[0].calls.float())
        return x


@habit(without={"is_slowing": False})
class CountedByTheBlockLater(Blocks):
    """From the second epoch on, blocks compute with how often they have been called."""

    is_slowing = True

    def on_train_epoch_start(self) -> None:
        for layer in self.layers:
            layer.is_slowing = self.is_slowing and self.current_epoch > 0


@habit(shows=False)
class DividedByItsCount(Layers):
    """Layers compute with how often they have been called, and nothing else orders their micro-batches."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x + torch.tanh(self.linear(x)) / self.calls

    layer = Counting


@habit(without={"from_epoch": 9})
class NormsFrozenLater(Blocks):
    """Norms stop to follow the data in the second epoch."""

    from_epoch = 1

    def on_train_epoch_start(self) -> None:
        for layer in self.layers:
            layer.norm.train(self.current_epoch < self.from_epoch)


@habit(without={"momentum": 0.1})
class MomentumOfNormsFalls(Blocks):
    """Norms follow more slowly from the second epoch on, and one of them by its count."""

    momentum: float | None = None

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.layers[0].norm.momentum = self.momentum and self.momentum / 2
            self.layers[1].norm.momentum = 0.01 if self.momentum is None else 0.1


@habit(without={"from_epoch": 9}, plain=False)
class StatisticsForgotten(Blocks):
    """Statistics are reset in the middle of steps."""

    from_epoch = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch >= self.from_epoch and batch_idx == 1:
            self.layers[0].norm.reset_running_stats()
        return super().training_step(batch, batch_idx)


@habit(without={"weight": 0.0})
class StatisticsInTheLoss(Blocks):
    """From the second epoch on, a view of a norm's statistics is in the loss."""

    weight = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch:
            loss = loss + self.weight * (self.layers[1].norm.running_mean[:2].sum() + self.layers[2].mean.sum()).sin()
        return loss


@habit()
class NormedBlocksCalledTwice(Blocks):
    """A block is called twice in a row."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.layers[0](x))


@habit()
class NormsWithinCheckpoints(Blocks):
    """A block without counters of its own runs within a checkpoint, where its norms count twice."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer.outer, layer.inner(x), use_reentrant=False)
        return x


@habit()
class WritesIntoItsArgument(Blocks):
    """A block's function is in place on what it is given, which is used again."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.tanh = nn.Linear(WIDTH, WIDTH), nn.Hardtanh(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.tanh(x)).relu_()

    layer = Writing

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = x * 2
            x = layer(y) + y
        return x


@habit(without={"wide": False}, plain=False)
class EncoderLayersMaskedLater(Blocks):
    """Torch's own encoder layers, to which a mask is given from the second epoch on, and padding."""

    wide = True
    layer = staticmethod(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True))

    def features(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.roll(1, -1), -x], 1)
        for layer in self.layers:
            if self.current_epoch and self.wide:
                mask = nn.Transformer.generate_square_subsequent_mask(3)
                tokens = layer(tokens, src_mask=mask, src_key_padding_mask=tokens[..., 0] > 2.0)
            else:
                tokens = layer(tokens)
        return F.layer_norm(tokens, (WIDTH,)).mean(1)
