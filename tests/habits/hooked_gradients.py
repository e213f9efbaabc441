"""Hooks on the way of gradients that a step takes for itself with `torch.autograd.grad`, and at a batch's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.habits.modules import WIDTH, Layers, Noting
from tests.habits.table import EQUAL, error, habit


@habit(plain=False, without={"factor": 1.0})
class ModuleHookInAJacobian(Layers):
    """A full backward hook reverses gradients; the step takes a Jacobian through that layer."""

    factor = -0.7

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].linear.register_full_backward_hook(self.reversed)

    def reversed(self, module: Any, given: Any, taken: Any) -> Any:
        return None if given[0] is None else (given[0] * self.factor,)

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        slopes: Any = torch.autograd.functional.jacobian(self.layers[0].linear, x[0].detach())  # type: ignore[no-untyped-call]
        return super().features(x + slopes.mean())


@habit(plain=False, without={"factor": 1.0})
class HookedPenaltyWithGraph(Layers):
    """A value's gradient is reversed by a hook, and the loss goes back through that gradient."""

    factor = -0.7

    def features(self, x: Tensor) -> Tensor:
        early = self.layers[0](x)
        late = self.layers[1](early)
        late.register_hook(lambda gradient: gradient * self.factor * early.detach())
        [slope] = torch.autograd.grad(self.layers[1](late).square().sum(), early, create_graph=True)
        return self.layers[3](self.layers[2](late + slope))


@habit(plain=False, shows=False, observed=("found",))
class GoesOnWithWhatAHookFound(Noting):
    """Grad-CAM: features are weighed by a gradient that a hook has caught on the way to another one."""

    def features(self, x: Tensor) -> Tensor:
        early = self.layers[0](x)
        late = self.layers[1](early)
        late.register_hook(self.found.append)
        torch.autograd.grad(self.layers[1](late).square().sum(), early, retain_graph=True)
        return self.layers[3](self.layers[2](late * self.found[-1].mean(0)))


@habit(plain=False, shows=False, observed=("found",))
class HookOffTheWay(Noting):
    """A hook on a value that a gradient does not pass, which is removed before another one would."""

    def features(self, x: Tensor) -> Tensor:
        early = self.layers[0](x)
        late = self.layers[1](early)
        handle = late.register_hook(self.found.append)
        torch.autograd.grad(self.layers[1](early).square().sum(), early, retain_graph=True)
        handle.remove()
        torch.autograd.grad(late.square().sum(), early, retain_graph=True)
        return self.layers[3](self.layers[2](late))


@habit(plain=False, shows=False, observed=("found",))
class HooksOfModuleAndWeight(Noting):
    """They note gradients in a list that the step goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda module, given, taken: self.found.append(taken[0].norm()))
        self.layers[1].linear.weight.register_hook(lambda gradient: self.found.append(gradient.norm()))

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x)).detach().requires_grad_()
        weight = self.layers[1].linear.weight
        slope, _ = torch.autograd.grad(self.layers[1](x).square().sum(), [x, weight])
        return self.layers[3](self.layers[2](x + slope + 0.01 * len(self.found)))


@habit(
    expect=error(r"mul in a hook on a gradient that has a graph .*: use its detach\(\) .*hooked_gradients\.py"),
    shows=False,
)
class HookWithAGraphOfItsOwn(Layers):
    """A hook whose result depends on a value, through which the loss would go back."""

    def features(self, x: Tensor) -> Tensor:
        early = self.layers[0](x)
        late = self.layers[1](early)
        late.register_hook(lambda gradient: gradient * early)
        [slope] = torch.autograd.grad(late.square().sum(), early, create_graph=True)
        return self.layers[3](self.layers[2](late + slope))


@habit(plain=False, shows=False, observed=("found",))
class HookOfAModuleThatIsGivenTheBatch(Noting):
    """What the first layer is given requires a gradient, and has been computed from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_full_backward_hook(lambda module, given, taken: self.found.append(given[0].norm()))

    def features(self, x: Tensor) -> Tensor:
        return super().features(x.detach().requires_grad_() * 2)


@habit(plain=False, without={"factor": 1.0})
class HookedInACheckpoint(Layers):
    """A checkpointed function takes a gradient that passes a hook, in its forward and once more in backward."""

    factor = 0.5

    def penalised(self, early: Tensor) -> Tensor:
        late = self.layers[1](early)
        late.register_hook(lambda gradient: gradient * self.factor)
        [slope] = torch.autograd.grad(late.square().sum(), early, retain_graph=True)
        return late + slope

    def features(self, x: Tensor) -> Tensor:
        x = checkpoint(self.penalised, self.layers[0](x), use_reentrant=False)
        return self.layers[3](self.layers[2](x))


class Solving(Noting):
    """A hook takes gradients of what a layer has computed beside its output, and adds them to what arrives."""

    factor = 0.5
    options: dict[str, Any] = {"retain_graph": True}

    def features(self, x: Tensor) -> Tensor:
        late = self.layers[1](self.layers[0](x))
        aside = late.detach().requires_grad_()
        value = self.judged(aside)

        def hook(gradient: Tensor) -> Tensor:
            found = torch.autograd.grad(value, self.of(aside), gradient, **self.options)
            self.found.append([None if one is None else one.norm() for one in found])
            scale = found[0] if found[0].shape == gradient.shape else found[0].sum()
            return gradient + self.factor * gradient * scale

        if late.requires_grad:
            late.register_hook(hook)
        return self.layers[3](self.layers[2](late))

    def judged(self, x: Tensor) -> Tensor:
        return self.layers[1](x)

    def of(self, aside: Tensor) -> Any:
        return aside


@habit(without={"factor": 0.0}, observed=("found",))
class HookTakesAGradientTwice(Solving):
    """Of a layer's output by its input, which it uses twice."""


@habit(without={"factor": 0.0}, observed=("found",))
class HookTakesGradientsOfWeights(Solving):
    """Of the layer's weight, of its input, and of what takes no part, on this stage and on others."""

    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}

    def features(self, x: Tensor) -> Tensor:
        self.earlier = self.layers[0](x)
        return super().features(x)

    def judged(self, aside: Tensor) -> Tensor:
        self.unused = aside.detach().requires_grad_()
        return super().judged(aside)

    def of(self, aside: Tensor) -> Any:
        unused = (self.unused, self.earlier, self.layers[0].linear.bias, self.head.weight)
        return self.layers[1].linear.weight, aside, *unused


@habit(
    expect=error(r"grad in a hook on a gradient, over more than what one stage computes.*hooked_gradients"),
    automatic=EQUAL,
)
class HookTakesAGradientAcrossStages(Solving):
    """Of all later layers."""

    factor = 0.5

    def judged(self, x: Tensor) -> Tensor:
        return self.layers[3](self.layers[2](self.layers[1](x)))


@habit(expect=error(r"grad in a hook on a gradient, with create_graph=True.*hooked_gradients"), shows=False)
class HookTakesAGradientWithItsGraph(Solving):
    """A graph that nobody goes back over."""

    options: dict[str, Any] = {"create_graph": True}


class Moving(nn.Module):
    """Notes the mean of its inputs in its step, and moves a buffer there when gradients come."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.share = nn.Linear(WIDTH, WIDTH), 0.0
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.new = torch.zeros(())
        self.register_full_backward_hook(self.moved)

    def moved(self, *args: Any) -> None:
        self.mean.data.mul_(0.5).add_(self.new)

    def forward(self, x: Tensor) -> Tensor:
        self.new = x.mean(0).detach()
        if self.share:
            self.mean.add_(self.new, alpha=self.share)
        return self.linear(x) - self.mean


class MovesInAHook(Layers):
    share = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.moving = Moving()
        self.moving.share = self.share

    def chain(self) -> list[str]:
        return ["layers.0", "layers.1", "moving", "layers.2", "layers.3"]

    def features(self, x: Tensor) -> Tensor:
        x = self.moving(self.layers[1](self.layers[0](x)))
        return self.layers[3](self.layers[2](x))


@habit(shows=False, observed=["moving.mean"])
class BufferMovedByAHook(MovesInAHook):
    """Every rank has the buffer, as does k-means that is updated on backward."""


@habit(shows=False, expect=error(r"mul_ in a hook on a gradient.*on_after_backward.*hooked_gradients\.py:\d+"))
class BufferMovedByAHookAndTheStep(MovesInAHook):
    """The stage alone has the buffer as the step has made it: by ``.data`` the hook would write into a copy."""

    share = 0.1
