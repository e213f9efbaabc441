"""Comparisons of what different stages hold: Python asks a subclass first, and so turns some of them around."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.habits.modules import WIDTH, Layers, Noting
from tests.habits.table import habit


@habit(shows=False, plain=False, observed=["found"])
class LargestOfAllWeights(Noting):
    """The largest weight before each backward, and more of the kind at an epoch's end."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.found.append(max(parameter.detach().abs().max() for parameter in self.parameters()))

    def on_train_epoch_end(self) -> None:
        norms = [parameter.detach().norm() for parameter in self.parameters()]
        self.found += [min(norms), *sorted(norms)[:2]]
        first, last = self.layers[0].linear.bias.detach() * 1, self.layers[3].linear.bias.detach() * 1
        self.found += [(first == last).sum(), (last != first).sum(), (first <= last).sum(), (last >= first).sum()]
        self.found += [(first < last).float().mean(), torch.gt(first, last).sum(), last.lt(first).sum()]


@habit(shows=False, plain=False)
class RunningMaximum(Layers):
    """A buffer that follows the features of one layer limits those of a later one."""

    top: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("top", torch.zeros(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        now = x.detach().max(0).values
        self.top.copy_(torch.where(self.top < now, now, self.top))
        x = self.layers[2](self.layers[1](x))
        return self.layers[3](x * (self.top > x).float() + x * (x == self.top))


@habit(shows=False, plain=False)
class LimitsFromAHook(Layers):
    """A hook makes limits of the first and the last layer's weights, for the next step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.early, self.late = (self.layers[i].linear.weight.detach().abs().mean(0) for i in (0, 3))

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        return x * (self.late < x).float() + (self.early > x) * x + x * (self.early < self.late)
