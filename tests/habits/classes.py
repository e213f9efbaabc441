"""Habits of code that asks for the class of a tensor in other ways than by isinstance."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.habits.modules import Evaluated, Layer, Layers, Noting
from tests.habits.table import habit


@habit()
class TypeOfOutputIsTensor(Layers):
    """A step looks whether the network gave a tensor, by `type(...) is`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out, y)
        if type(out) is torch.Tensor:
            loss = loss + 0.1 * out.square().mean()
        return loss


class EitherLayer(Layer):
    """Takes a tensor, or a pair of a tensor and a scale."""

    scale = 2.0

    def forward(self, x: Any) -> Any:
        if type(x) == torch.Tensor:  # noqa: E721
            x = (x, self.scale)
        hidden, scale = x
        return super().forward(hidden) * scale


@habit(without={"layer": type("Constant", (EitherLayer,), {"scale": 1.0})})
class TypeOfInputEqualsTensor(Layers):
    """Layers look whether they were given a tensor, by `type(...) ==`."""

    layer = EitherLayer


@habit()
class TypesInTable(Layers):
    """What is done with a value is looked up by its type."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        scales = {torch.Tensor: 0.5, nn.Parameter: 2.0}
        loss = F.cross_entropy(out, y) * scales.get(type(out), 1.0)
        return loss + sum(p.square().sum() * 1e-3 * scales.get(type(p), 1.0) for p in self.parameters())


@habit(observed=["found"])
class TypesOfParametersInHooks(Noting):
    """A hook counts parameters by their types."""

    def on_train_epoch_end(self) -> None:
        tensors = [*self.parameters(), *(p.detach() * 2 for p in self.parameters())]
        self.found.append([type(t) is nn.Parameter for t in tensors])
        self.found.append([type(t) in (torch.Tensor, list) for t in tensors])
        self.found.append([t.__class__ is nn.Parameter for t in tensors])
        self.found.append({kind.__name__ for kind in map(type, tensors)})


@functools.singledispatch
def penalty(value: Any) -> Any:
    raise TypeError(type(value))


@penalty.register
def _(value: torch.Tensor) -> Any:
    return value.square().mean()


@penalty.register
def _(value: nn.Parameter) -> Any:
    return value.abs().mean()


@habit()
class DispatchedByClass(Layers):
    """functools.singledispatch for tensors and parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        weights = sum(penalty(p) for p in self.parameters())
        return F.cross_entropy(out, y) + 0.1 * penalty(out) + 0.01 * weights


@habit(plain=False)  # its number of parts
class ClassesMadeAndAsked(Evaluated):
    """Calls of `type` for other ends: classes made, metaclasses, isinstance of classes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        point = type("Point", (), {"scale": 0.5})
        assert isinstance(point, type) and issubclass(type(point), type) and type(point) is type

        class Meta(type):
            rate = 2.0

        class Made(metaclass=Meta):
            pass

        assert type(Made) is Meta and isinstance(Meta, type) and Made.rate == 2.0 and type[int] == type[int]
        kinds: dict[type, float] = {type(x): 0.25}
        out = self(x) if type(self.layers[0]) is Layer else x
        return F.cross_entropy(out, y) * point.scale + kinds[type(out)] * out.mean()
