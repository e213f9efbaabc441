"""Hand-optimized steps whose parts use what earlier ones have made, and go back through it in several backwards."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.habits.modules import WIDTH, Layers
from tests.habits.table import habit


class ByHand(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@habit(plain=False)
class ParametersInTwoGraphs(ByHand):
    """Two losses come from graphs of their own, both made after a step, in which the same layers take part."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        early = self.layers[0](x)
        optimizer.step()
        later = self.layers[3](self.layers[0](early))
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        self.manual_backward(later.square().mean())
        self.log("train_loss", loss)

    def on_train_batch_end(self, *_: Any) -> None:
        self.optimizers().step()
        self.optimizers().zero_grad()


@habit(plain=False)
class LargeParameterInTwoGraphs(ByHand):
    """A parameter too large to be sent for each use is used on another stage, in two graphs with a backward each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].table = nn.Parameter(torch.randn(40_000, WIDTH) / 200)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        late = self.layers[3](self.layers[0](x))
        first = F.linear(late, self.layers[0].table).square().mean() + F.cross_entropy(self.head(late), y)
        second = F.linear(late.detach(), self.layers[0].table).abs().mean()
        self.manual_backward(first)
        self.manual_backward(second)
        self.log("train_loss", first + second)

    def on_train_batch_end(self, *_: Any) -> None:
        self.optimizers().step()
        self.optimizers().zero_grad()


@habit(plain=False)
class LayerUsedEarlyAfterLate(ByHand):
    """Two layers share a weight, which takes part on the second stage, on the first one, and on the second again."""

    depth = 6

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].linear.weight = self.layers[5].linear.weight

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        early = self.layers[0](x)
        late = self.layers[5](self.layers[3](early))
        late = late + self.layers[5](self.layers[4](late)) + self.layers[5](x).sigmoid()
        loss = F.cross_entropy(self.head(late + self.layers[1](early)), y)
        self.manual_backward(loss, retain_graph=True)
        self.log("train_loss", loss)

    def on_train_batch_end(self, *_: Any) -> None:
        self.optimizers().step()
        self.optimizers().zero_grad()


@habit(plain=False)
class LayerUsedEarlyAfterLateAndRead(LayerUsedEarlyAfterLate):
    """Likewise where a value is read, and what no gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        early = self.layers[0](x)
        late = self.layers[5](self.layers[5](self.layers[3](early)))
        self.log("seen", self.layers[5](late).sum().item())
        return F.cross_entropy(self.head(late + self.layers[1](early) + self.layers[5](x)), y)

    on_train_batch_end = Layers.on_train_batch_end


@habit(plain=False)
class HeadOnTwoStagesInALaterPart(ByHand):
    """The head is used for the first time in the second part, on the last stage and then on the first one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        early = self.layers[0](x)
        self.manual_backward(F.softplus(-self.layers[3](early.detach())).mean())
        late = self.layers[3](early.detach())
        loss = F.cross_entropy(self.head(late), y) + F.cross_entropy(self.head(early), y)
        self.manual_backward(loss)
        self.optimizers().step()
        self.log("train_loss", loss)
