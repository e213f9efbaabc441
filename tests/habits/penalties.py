"""Penalties on the weights, at the end of a step, of layers that take part in several places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.modules import WIDTH, Layers
from tests.habits.table import habit


class Decayed(Layers):
    """L2 of all parameters."""

    decay = 0.001

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.decay * sum(p.square().sum() for p in self.parameters())


@habit(plain=False, without={"decay": 0.0})
class PenaltyAfterSecondVisit(Decayed):
    """The last layer, and then all of them, with a recurrent one, whose stage computes it on its second visit."""

    beside = {"recurrent": "layers.1"}

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(2, 2, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.layers[3](x)))
        x = self.recurrent(x.reshape(-1, 4, 2))[0].reshape(-1, WIDTH)
        return self.layers[3](self.layers[2](x))


class Centered(nn.Module):
    """A layer of deviations from a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return torch.tanh(self.linear(x - self.mean))


@habit(plain=False, without={"decay": 0.0})
class PenaltyOnTwoStages(Decayed):
    """A layer on the last stage, whose weights an earlier stage uses as well, for what is only shown."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = Centered()

    def features(self, x: Tensor) -> Tensor:
        early = self.layers[1](self.layers[0](x))
        x = self.layers[3](early)
        self.log("shown", self.layers[3].linear(early).square().mean())  # type: ignore[union-attr, operator]
        return self.layers[3](x)


@habit(plain=False, without={"weight": 0.0}, trainer={"detect_anomaly": True})
class PenaltyUnderAnomalyDetection(Layers):
    """A gradient penalty within a stage, where autograd looks for NaN."""

    weight = 0.1

    def features(self, x: Tensor) -> Tensor:
        early = self.layers[0](x)
        late = self.layers[0](early)
        [slope] = torch.autograd.grad(late.square().sum(), early, create_graph=True)
        return self.layers[3](self.layers[2](self.layers[1](late + self.weight * slope)))
