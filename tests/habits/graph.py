"""What steps do with autograd's graph: hooks, functions of their own, several calls, gradients within the step."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import WIDTH, Layer, Layers
from tests.habits.table import EQUAL, error, habit

ACROSS = error(r"goes back over what stages \d.*Put these modules on one stage \(layers\.0")
"""What an error for a gradient that is taken across stages names."""


@habit(without={"factor": 1.0})
class TensorHookScales(Layers):
    """`x.register_hook(lambda g: g * 2)` on every hidden value, those at boundaries among them."""

    factor = 2.0

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * self.factor)
        return x


@habit(observed=["norms"], plain=False)
class TensorHookRecords(Layers):
    """A hook on the features appends the norm of the gradient to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        middle = self.layers[1](self.layers[0](x))
        middle.register_hook(lambda gradient: self.norms.append(gradient.norm().item()))
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](middle))), y)


@habit(observed=["activations"], plain=False)
class GradCAM(Layers):
    """retain_grad on a hidden value, whose gradient is read after the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.activations: list[float] = []
        self.middle: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.middle = self.layers[1](self.layers[0](x))
        self.middle.retain_grad()
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](self.middle))), y)

    def on_after_backward(self) -> None:
        assert self.middle is not None and self.middle.grad is not None
        self.activations.append((self.middle.grad.mean(0) * self.middle.detach()).sum().item())


@habit(observed=["norms"], plain=False)
class FullBackwardHookRecords(Layers):
    """Full backward hooks on all layers note the norms of their output gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[int, list[float]] = {}
        for number, layer in enumerate(self.layers):
            layer.register_full_backward_hook(
                lambda module, grad_input, grad_output, number=number: self.norms.setdefault(number, []).append(
                    grad_output[0].norm().item()
                )
            )


@habit(without={"factor": 1.0})
class FullBackwardHookScales(Layers):
    """A full backward hook changes the gradient that goes on."""

    factor = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_full_backward_hook(
            lambda module, grad_input, grad_output: (grad_input[0] * self.factor,)
        )


@habit(without={"factor": 1.0})
class FullBackwardPreHookScales(Layers):
    """A full backward pre-hook changes what comes."""

    factor = 0.5

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * self.factor,))


@habit(without={"weight": 0.0})
class ForwardHooksCollect(Layers):
    """Forward hooks collect the features of all layers for a loss, as perceptual losses do."""

    weight = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.collected: dict[str, Tensor] = {}
        for name, module in self.named_modules():
            if isinstance(module, Layer):
                module.register_forward_hook(lambda m, args, output, name=name: self.collected.update({name: output}))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        total = sum(value.pow(2).mean() for value in self.collected.values())
        self.collected.clear()
        return loss + self.weight * total


@habit(without={"scale": 1.0})
class ForwardHooksChange(Layers):
    """A forward pre-hook and a forward hook change what goes in and comes out; one is removed again."""

    scale = 0.8

    def __init__(self) -> None:
        super().__init__()
        self.handle = self.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * self.scale,))
        self.layers[3].register_forward_hook(lambda module, args, output: output * self.scale)

    def on_train_epoch_end(self) -> None:
        self.handle.remove()


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.strength * gradient, None


@habit(without={"top": 0.0})
class GradientReversal(Layers):
    """DANN: a domain head behind a gradient reversal, whose strength grows with the step."""

    top = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(WIDTH, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.layers[1](self.layers[0](x))
        strength = self.top * self.global_step / 6
        domain = F.cross_entropy(self.domain(Reversal.apply(features, strength)), (x[:, 0] > 0).long())
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](features))), y) + domain


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2)


@habit()
class QuantisedBetweenLayers(Layers):
    """A function of its own with saved tensors, between all layers."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Rounding.apply(layer(x))
        return x


rounding = Rounding.apply
IS_PYTHON = inspect.ismethod(rounding)  # until torch 2.13; afterwards nobody sees calls by another name


@habit(expect=EQUAL if IS_PYTHON else error(r"Write a function, `def function\(\*args\): return Rounding.apply"))
class FunctionByAName(Layers):
    """`rounding = Rounding.apply` at the top of the file."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = rounding(layer(x))
        return x


@habit()
class StraightThrough(Layers):
    """`x + (sign(x) - x).detach()`"""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x + 0.1 * (x.sign() - x).detach()
        return x


@habit(without={"weight": 0.0})
class PenaltyWithinLastStage(Layers):
    """torch.autograd.grad of the logits by the features, with create_graph, where both are on the last stage."""

    weight = 0.1
    on_last_stage = ("critic",)

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        scores = self.critic(features)
        (gradient,) = torch.autograd.grad(scores.sum(), features, create_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).pow(2).mean()
        return F.cross_entropy(self.head(features), y) + scores.mean() + self.weight * penalty


@habit(without={"weight": 0.0})
class PenaltyWithinFirstStage(Layers):
    """The same for the first layer, by its input."""

    weight = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.detach().requires_grad_(True)
        first = self.layers[0](x)
        (gradient,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        features = self.layers[3](self.layers[2](self.layers[1](first)))
        return F.cross_entropy(self.head(features), y) + self.weight * gradient.norm(dim=1).mean()


@habit(expect=ACROSS, without={"weight": 0.0})
class PenaltyAcrossStages(Layers):
    """R1: the gradient of the logits by the input, over all stages."""

    weight = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.detach().requires_grad_(True)
        logits = self(x)
        (gradient,) = torch.autograd.grad(logits.gather(1, y[:, None]).sum(), x, create_graph=True)
        return F.cross_entropy(logits, y) + self.weight * gradient.pow(2).sum(1).mean()


@habit(expect=ACROSS, automatic=error("calls 0 modules that a stage can begin with"), without={"step": 0.0})
class AdversarialAcrossStages(Layers):
    """FGSM: an input is moved along the gradient of the whole model's loss, and goes through it again."""

    step = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(self(x), y), x)
        return F.cross_entropy(self((x + self.step * gradient.sign()).detach()), y)


@habit(expect=ACROSS, plain=False, without={"calls": False})
class BackwardInStep(Layers):
    """`.backward()` by hand in an automatic step, over all stages."""

    calls = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.calls:
            (0.1 * loss).backward(retain_graph=True)
        return loss


@habit()
class Siamese(Layers):
    """The whole model is called twice, and both results are compared."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first, second = self.features(x), self.features(x.flip(0))
        same = (y == y.flip(0)).float()
        distance = (first - second).pow(2).sum(1)
        return (same * distance + (1 - same) * F.relu(1 - distance)).mean()


@habit()
class Triplet(Layers):
    """Three calls in a row, and torch's triplet loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        anchor, positive, negative = self(x), self(0.9 * x), self(x.roll(1, 0))
        return F.triplet_margin_loss(anchor, positive, negative) + anchor.mean()


@habit(without={"weight": 0.0})
class RDrop(Layers):
    """The second call runs under no_grad, as a target for the first."""

    weight = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        with torch.no_grad():
            target = self(x.flip(1)).softmax(-1)
        return F.cross_entropy(logits, y) + self.weight * F.kl_div(F.log_softmax(logits, -1), target)


@habit(without={"rounds": 1})
class RecurrentRefinement(Layers):
    """A loop over all stages: what comes out of the last layer goes into the first again, with the input."""

    rounds = 3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        state, losses = torch.zeros_like(x), []
        for _ in range(self.rounds):
            state = self.features(x + 0.5 * state)
            losses.append(F.cross_entropy(self.head(state), y))
        return torch.stack(losses).mean()


@habit()
class EncoderUsedAgain(Layers):
    """CycleGAN's reconstruction: the first layers see the output of the last ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        code = self.layers[1](self.layers[0](x))
        out = self.layers[3](self.layers[2](code))
        again = self.layers[1](self.layers[0](out))
        return F.mse_loss(out, x) + F.mse_loss(again, code)


@habit()
class OneLayerManyTimes(Layers):
    """A universal transformer: each layer is called three times by its own stage."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for time in range(3):
                x = layer(x + 0.1 * time)
        return x


@habit()
class AutocastInStep(Layers):
    """A part runs under bfloat16 autocast, and goes on in fp32."""

    def features(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[2](self.layers[1](self.layers[0](x)))
        return self.layers[3](x.float())


@habit(without={"weight": 0.0})
class InferenceModeTeacher(Layers):
    """A teacher's target is computed under inference_mode, and cloned."""

    weight = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.inference_mode():
            target = self.teacher(x)
        features = self.features(x)
        return F.cross_entropy(self.head(features), y) + self.weight * F.mse_loss(features, target.clone())


@habit()
class MixtureOfExperts(Layers):
    """Tokens are routed to the layers by an argmax: how many each gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)

    def features(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        chosen = probabilities.argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.layers):
            rows = (chosen == number).nonzero()[:, 0]
            result = result.index_add(0, rows, expert(x[rows]) * probabilities[rows, number, None])
        return result


@habit()
class OperatorsAndBuiltins(Layers):
    """sum(), max(), sorted(), zip() and operators over rows of hidden values."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            rows = list(x)
            x = torch.stack([operator.add(row, 0.1 * other) for row, other in zip(rows, reversed(rows), strict=True)])
            x = x / (1 + max(rows, key=lambda row: float(row.sum())).detach().abs())
        return x


@habit(without={"weight": 0.0})
class SecondOptimisationTerm(Layers):
    """Two losses, one of which only reaches the last layers, weighted by their detached ratio."""

    weight = 0.8

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.layers[1](self.layers[0](x))
        first = F.cross_entropy(self.head(self.layers[3](self.layers[2](features))), y)
        second = self.head(self.layers[3](self.layers[2](features.detach()))).pow(2).mean()
        return first + (first / second).detach() * second * self.weight
