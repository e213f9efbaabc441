"""Decoding loops and choices that are drawn at random, with probabilities that change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import WIDTH, Layers
from tests.habits.table import habit


class Decoder(Layers):
    """Decodes three steps, each of which gets the target or its own output as input."""

    def chooses_target(self) -> bool:
        return True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        targets = torch.stack([x.roll(1, 1), x.roll(2, 1), x.roll(3, 1)])
        previous, losses = x, []
        for target in targets:
            output = self.features(previous)
            losses.append(F.mse_loss(output, target))
            previous = target if self.chooses_target() else output.detach()
        return torch.stack(losses).mean()


@habit(plain=False)
class TeacherForcingByPython(Decoder):
    """Scheduled sampling by random.random(); the loop runs over all stages, three times."""

    def chooses_target(self) -> bool:
        return random.random() < 1 - 0.3 * self.current_epoch - 0.3


@habit(plain=False)
class TeacherForcingByNumpy(Decoder):
    """The same by numpy."""

    def chooses_target(self) -> bool:
        return bool(np.random.rand() < 0.5)


@habit(plain=False)
class TeacherForcingByTorch(Decoder):
    """The same by torch, read as a bool."""

    def chooses_target(self) -> bool:
        return bool(torch.rand(1) < 0.5)


@habit(plain=False, without={"probability": 1.0})
class TeacherForcingInOneStage(Layers):
    """Decodes with the recurrent cell of one stage, which teacher forcing feeds."""

    probability = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        state = self.features(x)
        token, losses = x, []
        for _ in range(3):
            state = self.cell(token, state)
            losses.append(F.cross_entropy(self.head(state), y))
            token = x if random.random() < self.probability else state
        return sum(losses) / len(losses)


@habit(plain=False)
class ScheduledSamplingPerSample(Layers):
    """A mask of bernoulli draws mixes two inputs, with a probability that falls."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        probability = 0.9 - 0.1 * self.global_step
        mask = torch.bernoulli(torch.full((len(x), 1), probability))
        hidden = self.layers[1](self.layers[0](x))
        hidden = mask * hidden + (1 - mask) * x
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](hidden))), y)


@habit(plain=False, without={"rate": 0.0})
class DropoutFromSecondEpoch(Layers):
    """Dropout's probability is set when the epoch begins."""

    rate = 0.3

    def on_train_epoch_start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = self.rate * self.current_epoch


@habit(plain=False, without={"sigma": 0.0})
class NoiseFromSecondEpoch(Layers):
    """Noise on the hidden values between layers, from the second epoch on."""

    sigma = 0.2

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.training and self.current_epoch > 0:
                x = x + self.sigma * torch.randn_like(x)
        return x


@habit(plain=False)
class GumbelTemperatureByHook(Layers):
    """Gumbel softmax whose tau a hook sets before each batch."""

    tau = 2.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tau = max(0.5, 2.0 * 0.8**self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.layers[1](self.layers[0](x))
        x = x * F.gumbel_softmax(x, tau=self.tau, hard=False)
        self.log("tau", self.tau)
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](x))), y)


@habit(plain=False)
class LayerDropByPython(Layers):
    """Layers are skipped at random, as in layerdrop."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.3:
                continue
            x = layer(x)
        return x


@habit(plain=False, without={"alpha": 0.0})
class MixupByNumpy(Layers):
    """Mixup with a coefficient from numpy and a permutation from torch."""

    alpha = 0.4

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        weight = float(np.random.beta(self.alpha, self.alpha)) if self.alpha else 1.0
        order = torch.randperm(len(x))
        logits = self(weight * x + (1 - weight) * x[order])
        return weight * F.cross_entropy(logits, y) + (1 - weight) * F.cross_entropy(logits, y[order])
