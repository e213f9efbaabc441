"""What hooks do on the first rank alone, and with copies and plain tensors that they keep."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.habits.checkpointing import folder_of
from tests.habits.modules import Layers
from tests.habits.table import error, habit


@habit(plain=False, shows=False)  # the file is compared
class StatisticsOnFirstRank(Layers):
    """Statistics of weights and gradients, written by rank 0 in the middle of a hook that goes on to change weights."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.detach().norm() for parameter in self.parameters()]
        if self.trainer.is_global_zero:
            found = {name: p.grad.abs().max().item() for name, p in self.named_parameters() if p.grad is not None}
            found["norm"] = sum(norm.item() for norm in norms)
            (folder_of(self) / f"{self.global_step}.json").write_text(json.dumps(found))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.99)


@habit(plain=False, shows=False, tolerance=1e-6)  # gradients add up in another order on four stages
class TeacherCopiedIntoList(Layers):
    """A teacher that is no submodule: copies of the layers in a list, used in steps and led on in a hook."""

    def on_train_start(self) -> None:
        self.teacher = [copy.deepcopy(layer).requires_grad_(False) for layer in self.layers]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = target = batch[0]
        for layer in self.layers:
            hidden = layer(hidden)
        with torch.no_grad():
            for layer in self.teacher:
                target = layer(target)
        return super().training_step(batch, batch_idx) + F.mse_loss(hidden, target)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for layer, own in zip(self.teacher, self.layers, strict=True):
            for old, new in zip(layer.parameters(), own.parameters(), strict=True):
                old.lerp_(new, 0.1)


@habit(plain=False, shows=False, observed=["norms"])
class GradientOfBatchRead(Layers):
    """Saliency: the batch requires a gradient, which is read after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Any] = []
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.append(batch[0].requires_grad_())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.norms += [None if x.grad is None else x.grad.norm().item() for x in self.kept]
        self.kept = []


@habit(plain=False, shows=False, expect=error("a hook is registered on the gradient of a tensor that every rank has"))
class HookOnBatch(Layers):
    """A hook on the batch's gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].requires_grad_().register_hook(lambda gradient: gradient * 2)
        return super().training_step(batch, batch_idx)
