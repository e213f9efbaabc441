"""Containers that look at the forwards of their layers before they call them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from tests.habits.modules import Layer, Layers
from tests.habits.table import habit


class Shifted(Layer):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return super().forward(x) + (0.0 if shift is None else shift)


class Skipping(Layer):
    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        return super().forward(x) + (0.0 if skip is None else 0.3 * skip)


class GivenWhatTheyTake(Layers):
    """Each layer is given those extras that its forward takes."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(self.depth):
            self.layers[i] = Skipping() if i % 2 else Shifted()

    def names(self, forward: Any) -> Collection[str]:
        return ()

    def features(self, x: Tensor) -> Tensor:
        extras = {"shift": x.mean(1, keepdim=True), "skip": x}
        for layer in self.layers:
            names = self.names(layer.forward)
            x = layer(x, **{name: extra for name, extra in extras.items() if name in names})
        return x


@habit()
class BySignatureOfForward(GivenWhatTheyTake):
    def names(self, forward: Any) -> Collection[str]:
        return inspect.signature(forward).parameters


@habit()
class ByArgumentsOfForward(GivenWhatTheyTake):
    def names(self, forward: Any) -> Collection[str]:
        return inspect.getfullargspec(forward).args


@habit()
class ByCodeOfForward(GivenWhatTheyTake):
    def names(self, forward: Any) -> Collection[str]:
        code = forward.__func__.__code__ if inspect.ismethod(forward) else forward.__code__
        return code.co_varnames[: code.co_argcount]


@habit()
class ByNameOfForward(Layers):
    """What can be told of a forward, as it is of no great consequence, goes into the numbers."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            forward = layer.forward
            names = (forward.__name__, forward.__qualname__, forward.__module__, forward.__doc__, forward.__defaults__)
            x = layer(x) + 0.01 * len(str(names)) + (forward.__self__ is layer)
        return x


@habit()
class ForwardOfACopy(Layers):
    """A copy of a layer is called, and its forward."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            both = copy.copy(layer), copy.deepcopy(layer)
            for one in both:
                one.training = False
            with torch.no_grad():
                shift = both[0](x) + 0.5 * both[1].forward(x)
            x = layer(x) + 0.1 * shift
        return x
