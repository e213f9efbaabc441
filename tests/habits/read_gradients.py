"""Gradients that hand-optimized steps read: what all micro-batches have added up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.habits.by_hand import ByHand
from tests.habits.modules import Layers
from tests.habits.table import error, habit


class Reading(ByHand):
    """Reads gradients between backward and update."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def read(self) -> None:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.read()
        optimizer.step()


@habit(plain=False, observed=["seen"])
class LogsGradientNorms(Reading):
    def read(self) -> None:
        norms = [p.grad.detach().norm() for p in self.parameters() if p.grad is not None]
        self.log("grad_norm", torch.stack(norms).norm())
        if norms[0].item() > 0.1:
            self.seen.append(norms[-1])


@habit(plain=False, observed=["seen"])
class ScalesByNormOfGradients(Reading):
    """The rate follows from the gradient's norm, as in LARS by hand."""

    def read(self) -> None:
        weight = self.layers[1].linear.weight
        assert weight.grad is not None
        ratio = weight.detach().norm() / (weight.grad.norm() + 1e-6)
        self.optimizers().param_groups[0]["lr"] = 0.1 * min(float(ratio), 1.0)


@habit(plain=False, observed=["seen"])
class ProjectsConflictingLosses(Layers):
    """PCGrad: each loss has a backward of its own, and what its gradients say against the other's is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        hidden = self.features(x)
        found = []
        for loss in (F.cross_entropy(self.head(hidden), y), hidden.square().mean()):
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            found.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters()])
        first, second = (torch.cat([one.flatten() for one in each]) for each in found)
        dot = first @ second
        if dot < 0:
            first = first - dot / second.square().sum() * second
        self.log("dot", dot)
        self.seen.append(first.norm())
        optimizer.step()


@habit(plain=False, observed=["seen"])
class ReadsBeforeBackward(Reading):
    """What is left of the last batch, and whether there is any."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for p in self.parameters():
            if p.grad is not None:
                self.seen.append(p.grad.sum())
        loss = self.loss(batch)
        self.seen.append(self.head.weight.grad is None)
        self.zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


CHANGED = error(r"gradient of a parameter is changed within a step.*read_gradients\.py:\d+")


@habit(plain=False, shows=False, expect=CHANGED)
class ScalesGradientsItself(Reading):
    def read(self) -> None:
        for p in self.parameters():
            p.grad.mul_(0.5)  # type: ignore[union-attr]


@habit(plain=False, shows=False, expect=error(r"has read before it changed.*read_gradients\.py:\d+.*clone"))
class UsesAGradientReadBefore(Layers):
    """What has been read is used after another backward has added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.manual_backward(F.cross_entropy(self(x), y))
        before = self.head.weight.grad
        assert before is not None
        self.manual_backward(F.cross_entropy(self(x * 1.1), y))
        self.log("norm", before.norm())
        self.optimizers().step()
        self.optimizers().zero_grad()


@habit(plain=False, shows=False)
class NormsAllGradients(Reading):
    """By torch's function for a norm of all, which changes none."""

    def read(self) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.log("total", torch.nn.utils.get_total_norm(gradients))
        self.log("largest", torch.stack(torch._foreach_norm(gradients)).max())


@habit(plain=False, shows=False, observed=["seen"])
class ReadsWhatItHasCleared(Reading):
    def read(self) -> None:
        self.head.weight.grad = None
        self.seen.append(self.head.weight.grad is None)
        self.layers[1].zero_grad(set_to_none=False)
        self.seen.append(self.layers[1].linear.weight.grad.abs().sum())  # type: ignore[union-attr]


@habit(plain=False, shows=False, expect=error(r"a parameter is changed within a step.*read_gradients\.py:\d+.*an opt"))
class UpdatesByLists(Reading):
    """Of tensors of its own, into which each micro-batch writes."""

    def read(self) -> None:
        self.momenta = getattr(self, "momenta", [torch.zeros(p.shape) for p in self.parameters()])
        with torch.no_grad():
            for momentum, p in zip(self.momenta, self.parameters(), strict=True):
                assert p.grad is not None
                momentum.mul_(0.9).add_(p.grad)
                self.update(p, momentum)

    def update(self, parameter: Tensor, momentum: Tensor) -> None:
        parameter -= 0.1 * momentum


@habit(plain=False, shows=False, expect=error(r"a parameter is changed within a step.*read_gradients\.py:\d+.*an opt"))
class UpdatesByListsThroughViews(UpdatesByLists):
    def update(self, parameter: Tensor, momentum: Tensor) -> None:
        parameter.detach().view(-1).sub_(0.1 * momentum.view(-1))


@habit(plain=False, shows=False)
class UpdatesByItself(Reading):
    def read(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad


@habit(plain=False, shows=False)
class ClampsByItself(Reading):
    """After the gradient has been read."""

    def read(self) -> None:
        self.log("norm", self.head.weight.grad.norm())  # type: ignore[union-attr]
        for p in self.parameters():
            p.data.clamp_(-0.3, 0.3)
