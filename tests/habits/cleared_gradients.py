"""Gradients that the user clears: in steps, where micro-batches do it together, and in hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.habits.by_hand import ByHand
from tests.habits.modules import WIDTH, Evaluated, Layer, Layers
from tests.habits.table import habit


@habit(plain=False)
class StepSetsGradientsToNone(Layers):
    """A step clears all gradients in the quick way, which with automatic optimization changes nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for p in self.parameters():
            p.grad = None
        return super().training_step(batch, batch_idx)


@habit(plain=False)
class StepClearsModule(Layers):
    """Likewise by the module's `zero_grad`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.zero_grad()
        return super().training_step(batch, batch_idx)


@habit(plain=False)
class StepClearsModuleToZeros(Layers):
    """Likewise, to zeros."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.zero_grad(set_to_none=False)
        return super().training_step(batch, batch_idx)


@habit(plain=False)
class StepClearsOptimizer(Layers):
    """Likewise by the optimizer's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


@habit(plain=False)
class StepDeletesGradients(Layers):
    """Likewise by `del`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for p in self.parameters():
            del p.grad
        return super().training_step(batch, batch_idx)


@habit(plain=False)
class SetsGradientsToNoneByHand(ByHand):
    """A hand-optimized step clears gradients in the quick way."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            p.grad = None
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@habit(plain=False, trainer={"accumulate_grad_batches": 2})
class HookClearsAccumulated(Layers):
    """Gradients of a window are cleared in its middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for p in self.layers[1:].parameters():
            p.grad = None


@habit(plain=False)
class ClearsGradientsOfModules(ByHand):
    """Gradients are cleared by a layer's and by the module's own `zero_grad`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero_grad()
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        self.layers[0].zero_grad()
        self.layers[3].zero_grad(set_to_none=False)
        loss = F.cross_entropy(self(x) * 1.1, y)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss)


@habit(plain=False)
class NoneBeforeBackwardByHand(ByHand):
    """Likewise between forward and backward, by the optimizer's groups, and by a layer's own forward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for group in self.optimizers().param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.manual_backward(loss)
        self.optimizers().step()
        del self.head.weight.grad
        self.manual_backward(0.5 * self.loss(batch))
        self.optimizers().step()
        self.log("train_loss", loss)


class Clearing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.linear.weight.grad = None
        return super().forward(x)


@habit(plain=False)
class LayersClearTheirOwn(ByHand):
    """A layer's forward clears its own gradient."""

    layer = Clearing


@habit(plain=False, shows=False)
class ClearsInPlaceOfLightning(Layers):
    """Lightning is kept from clearing gradients, so that a step's own clearing counts."""

    def optimizer_zero_grad(self, *args: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 == 0:
            self.zero_grad()
        else:
            self.head.weight.grad = None
        return self.head(self.features(torch.ones(4, WIDTH))).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norm = float(self.head.weight.grad.norm())  # type: ignore[union-attr]
        self.first = norm if self.global_step == 1 else self.first
        assert abs(norm - self.first) < 1e-5  # all batches are alike


@habit(plain=False, trainer={"accumulate_grad_batches": 3, "val_check_interval": 1})
class ValidationClears(Evaluated):
    """A validation step clears what has accumulated so far."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.layers[0].zero_grad()
        self.head.weight.grad = None
        return super().validation_step(batch, batch_idx)
