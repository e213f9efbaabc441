"""Counters and statistics in checkpointed functions that several stages compute, or that go back to an early stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.habits.modules import WIDTH, Layer, Layers, Normed
from tests.habits.table import EQUAL, error, habit


class CountsBefore(Normed):
    """Counts its calls, and averages what it is given, before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x)


class CountsAfter(CountsBefore):
    """Counts its calls when it is done."""

    def forward(self, x: Tensor) -> Tensor:
        x = super(CountsBefore, self).forward(x)
        self.seen += 1
        return x


class Again(Layers):
    """The last layer and the first one, and then the others."""

    layer = CountsBefore

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.layers[3](x))
        x = checkpoint(self.middle, x, use_reentrant=False)
        return checkpoint(self.layers[3], x, use_reentrant=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[1](x))


@habit(plain=False, without={"layer": Normed})
class CountsBeforeLayersOfAnotherVisit(Again):
    """Counters of layers that stages compute on their second visit."""


@habit(plain=False)
class CountsAfterLayersOfAnotherVisit(Again):
    """Likewise, when the layers are done."""

    layer = CountsAfter


class OneFunction(Layers):
    """All layers in one checkpointed function."""

    layer = CountsAfter
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.entrance = nn.Linear(WIDTH, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        return checkpoint(self.all_layers, self.entrance(x), use_reentrant=self.reentrant)

    def all_layers(self, x: Tensor) -> Tensor:
        return super().features(x)


@habit(plain=False, without={"layer": Normed})
class CountsInAllLayers(OneFunction):
    """Only the last layer's counter is behind what backward needs, and does not go up again."""


@habit(plain=False)
class CountsInAllLayersReentrant(OneFunction):
    """With a reentrant checkpoint, that one goes up again as well."""

    reentrant = True


@habit(plain=False)
class CountsInBranches(OneFunction):
    """Three layers side by side, the last one's first."""

    layer = CountsBefore

    def all_layers(self, x: Tensor) -> Tensor:
        return self.layers[3](x) + self.layers[1](x) + self.layers[2](x)


NOWHERE = error(r"writes into the module .*computes nothing else.*do without the checkpoint")


@habit(expect=NOWHERE, automatic=EQUAL, shows=False)
class AveragesEarlyValueInCheckpoint(Again):
    """A checkpointed function of later layers averages what an early layer gave."""

    def features(self, x: Tensor) -> Tensor:
        early = self.layers[0](x)

        def rest(x: Tensor) -> Tensor:
            self.layers[1].mean.add_(early.detach().mean(0))  # type: ignore[union-attr, operator]
            return self.layers[2](x)

        x = checkpoint(rest, self.layers[3](early), use_reentrant=False)
        return self.layers[3](self.layers[1](x))


class Centred(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


@habit(expect=error(r"writes into the module.*goes on .*do without the checkpoint"), plain=False, shows=False)
class CentredInAllLayers(OneFunction):
    """What comes to the next stage would be another value when it is computed again."""

    layer = Centred


@habit(plain=False, shows=False)
class CentredInEachLayer(Layers):
    """Each stage computes its own layers again."""

    layer = Centred

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x
