"""Optimizers of the user's own, with methods that torch's do not have, which steps and hooks call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.by_hand import ByHand
from tests.habits.modules import WIDTH, Evaluated, Layers
from tests.habits.table import habit


class SharpnessAware(torch.optim.Optimizer):
    """SAM as its authors publish it: two halves of a step around another optimizer."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], rho: float, **options: Any) -> None:
        super().__init__(parameters, dict(rho=rho, **options))
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        scale = self.param_groups[0]["rho"] / (self._norm() + 1e-12)
        for parameter in self.trained():
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for parameter in self.trained():
            parameter.data = self.state[parameter]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def trained(self) -> list[Tensor]:
        return [one for group in self.param_groups for one in group["params"] if one.grad is not None]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        torch.enable_grad()(closure)()
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()

    def _norm(self) -> Tensor:
        norms = [one.grad.norm(p=2) for one in self.trained() if one.grad is not None]
        return torch.norm(torch.stack(norms), p=2)


@habit(plain=False, without={"rho": 0.0})
class SharpnessAwareByHand(ByHand):
    """Both halves are called in the step, each after a backward."""

    rho = 0.05

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.manual_backward(loss)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(self.loss(batch))
        optimizer.second_step(zero_grad=True)

    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), torch.optim.SGD, self.rho, lr=0.1, momentum=0.9)


@habit(plain=False, without={"rho": 0.0})
class SharpnessAwareByClosure(Layers):
    """Automatic optimization gives the step a closure, which it calls before each half."""

    rho = 0.05

    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), torch.optim.SGD, self.rho, lr=0.1, momentum=0.9)


class Averaging(torch.optim.SGD):
    """Steps from one point and is evaluated at the mean of all of them, as schedule-free optimizers are."""

    @torch.no_grad()
    def note(self) -> float:
        """Take in the weights of now. Returns how far their mean is from them."""
        distance = 0.0
        for parameter in (one for group in self.param_groups for one in group["params"]):
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            mean = state.setdefault("mean", torch.zeros_like(parameter))
            mean.lerp_(parameter, 1 / state["count"])
            distance += (mean - parameter).norm().item()
        return distance

    @torch.no_grad()
    def swap(self) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            mean = self.state[parameter]["mean"]
            parameter.data, self.state[parameter]["mean"] = mean.clone(), parameter.data.clone()


@habit(plain=False)
class AveragesByItsOwnMethod(ByHand):
    """A method that returns a number is called in steps, and another one in hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        self.log("distance", optimizer.note())

    def on_train_epoch_end(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.swap()

    def configure_optimizers(self) -> Any:
        return Averaging(self.parameters(), lr=0.1, momentum=0.9)


class Signed(torch.optim.Optimizer):
    """As Moonlight's Muon: which parameters are matrices is noted in their states when the optimizer is made."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["is_matrix"] = parameter.ndim >= 2

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if "mean" not in state:
                    state["step"], state["mean"] = 0, torch.zeros_like(gradient)
                state["step"] += 1
                mean = state["mean"].lerp_(gradient, 0.1)
                update = mean / (mean.norm() + 1e-7) if state["is_matrix"] else mean.sign()
                parameter.add_(update, alpha=-group["lr"])
        return loss


@habit(shows=False)  # the base has no optimizer to do without
class NotesKinds(Layers):
    def configure_optimizers(self) -> Any:
        return Signed(self.parameters(), lr=0.02)


@habit(calls=("fit", "validate", "fit"), shows=False)
class NotesKindsInTwoRuns(Evaluated):
    configure_optimizers = NotesKinds.configure_optimizers


@habit(observed=["seen"], plain=False, shows=False)
class NotesKindsReadInHooks(NotesKinds):
    """Hooks read the notes, and turn them round."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def on_train_batch_end(self, *_: Any) -> None:
        states = self.trainer.optimizers[0].state
        self.seen += (states[parameter]["is_matrix"] for parameter in self.parameters())
        if self.current_epoch == 1:
            for state in states.values():
                state["is_matrix"] = not state["is_matrix"]


class Counting(torch.optim.SGD):
    """A hook of its own on the head counts calls, by which the rate falls."""

    def __init__(self, module: Any) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self.calls = 0
        module.head.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.calls)
        super().step()
        return loss


@habit(shows=False)  # the base has no optimizer to do without
class CountsInTheOptimizer(Layers):
    def configure_optimizers(self) -> Any:
        return Counting(self)


class Preconditioned(torch.optim.SGD):
    """As KFAC: hooks of its own keep second moments of what linear layers are given, by which gradients are divided."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self.factors: dict[nn.Module, Tensor] = {}
        self.layers = [one for one in module.modules() if isinstance(one, nn.Linear)]
        for layer in self.layers:
            layer.register_forward_pre_hook(self.note)

    def note(self, layer: nn.Module, given: tuple[Tensor]) -> None:
        if torch.is_grad_enabled():
            x = given[0].detach()
            now = x.t() @ x / len(x)
            self.factors[layer] = 0.9 * self.factors[layer] + 0.1 * now if layer in self.factors else now

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for layer in self.layers:
            gradient: Any = layer.weight.grad
            gradient.copy_(gradient @ torch.linalg.inv(self.factors[layer] + torch.eye(WIDTH)))
        super().step()
        return loss


@habit(plain=False, shows=False)  # moments of micro-batches
class KeepsFactorsInTheOptimizer(Layers):
    def configure_optimizers(self) -> Any:
        return Preconditioned(self)
