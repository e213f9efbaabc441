"""Gradients that hooks read, change and clip, between the backward and the update."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.habits.modules import CLASSES, WIDTH, Layers, Noting
from tests.habits.table import error, habit


@habit(observed=["weights"], plain=False)
class WeightsFromHeadGradient(Layers):
    """GradNorm: the weights of two tasks follow the norms of their heads' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, CLASSES)
        self.weights = [1.0, 1.0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        early = self.layers[1](self.layers[0](x))
        features = self.layers[3](self.layers[2](early))
        first, second = F.cross_entropy(self.head(features), y), F.cross_entropy(self.second(early), (y + 1) % CLASSES)
        return self.weights[0] * first + self.weights[1] * second

    def on_after_backward(self) -> None:
        norms = [self.head.weight.grad.norm().item(), self.second.weight.grad.norm().item()]
        self.weights = [2 * norm / sum(norms) for norm in norms]


@habit(without={"factor": 1.0})
class GradientsScaledByHand(Layers):
    """Gradients of the first layers are scaled in on_before_optimizer_step."""

    factor = 0.1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.layers[:2].parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor)


@habit(without={"factor": 1.0})
class GradientsReplacedByHand(Layers):
    """`p.grad = sign(p.grad)`"""

    factor = 0.01

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.sign(parameter.grad) * self.factor if self.factor < 1 else parameter.grad


@habit(plain=False)
class GradientNoise(Layers):
    """Noise is added to all gradients, so every rank has to draw for every parameter."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)


@habit(without={"largest": 1e9})
class ClipsByItself(Layers):
    """torch.nn.utils.clip_grad_norm_ over all parameters."""

    largest = 0.2

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.largest)


@habit(without={"largest": 1e9}, observed=["norms"])
class ClipsByItselfAndLogs(Layers):
    """The same with its norm logged and kept as a number."""

    largest = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.largest, error_if_nonfinite=True)
        self.log("grad_norm", norm)
        self.norms.append(norm.item())


@habit(without={"largest": 1e9})
class ClipsEachLayer(Layers):
    """Each layer's gradients have a norm of their own."""

    largest = 0.05

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for layer in [*self.layers, self.head]:
            torch.nn.utils.clip_grad_norm_(layer.parameters(), self.largest)


@habit(plain=False, without={"largest": 1e9})
class ClipsValuesByItself(Layers):
    """clip_grad_value_ in on_after_backward."""

    largest = 0.01

    def on_after_backward(self) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), self.largest)


@habit(trainer={"gradient_clip_val": 0.2}, without={"epoch": 100})
class ClippingConfigured(Layers):
    """configure_gradient_clipping clips from the second epoch on only."""

    epoch = 1

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.current_epoch >= self.epoch:
            self.clip_gradients(
                optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
            )


@habit()
class GradientNormsLogged(Layers):
    """Lightning's grad_norm, as its documentation logs it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


@habit(observed=["histogram"])
class GradientStatisticsRead(Layers):
    """Means, maxima and histograms of each gradient are read as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.histogram: dict[str, Any] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                counts = torch.histc(parameter.grad, bins=5, min=-0.1, max=0.1).tolist()
                self.histogram[name] = (parameter.grad.abs().max().item(), float(parameter.grad.mean()), counts)


@habit(plain=False, observed=["bad"], without={"poison": 0.0})
class NonFiniteGradientsZeroed(Layers):
    """A step whose gradients are not finite is made one without gradients."""

    poison = float("inf")

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + self.poison) if self.global_step == 2 else loss

    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                self.bad.append(name)
                parameter.grad = torch.zeros_like(parameter.grad)


@habit(without={"centralises": False})
class GradientsCentralised(Layers):
    """Gradient centralisation, in an overridden optimizer_step."""

    centralises = True

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            for parameter in self.parameters() if self.centralises else ():
                if parameter.grad is not None and parameter.grad.ndim > 1:
                    parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
            return loss

        optimizer.step(closure=closure)


@habit(without={"start": 100})
class GradientsDroppedByName(Layers):
    """`p.grad = None` for some parameters from the third step on."""

    start = 2

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step >= self.start:
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.grad = None


@habit(without={"strength": 0.0})
class GradientsSurgery(Layers):
    """Two layers' gradients are mixed, which lie on different stages."""

    strength = 0.5

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first, last = self.layers[0].linear.weight, self.layers[3].linear.weight
        overlap = (first.grad * last.grad).sum() / last.grad.pow(2).sum()
        first.grad -= self.strength * overlap * last.grad


@habit(without={"start": 100}, observed=["largest"])
class LearningRateFromGradientNorm(Layers):
    """The learning rate of the step depends on the norm of all gradients."""

    start = 0

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.largest = max(self.largest, float(norm))
        if self.global_step >= self.start:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + float(norm))


@habit(trainer={"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}, plain=False, observed=["seen"])
class ParameterHooks(Layers):
    """`parameter.register_hook` scales gradients as they come, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        for layer in self.layers:
            layer.linear.weight.register_hook(lambda gradient: gradient * 0.5)
        self.layers[1].linear.bias.register_hook(self.count)

    def count(self, gradient: Tensor) -> None:
        self.seen += 1


@habit(plain=False, without={"penalty": 0.0})
class UpdatesComparedWithGradients(Layers):
    """Weights before an update are kept, and the update's size is logged after it."""

    penalty = 0.1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        ratios = [(p - b).norm() / (b.norm() + 1e-8) for p, b in zip(self.parameters(), self.before, strict=True)]
        self.log("update_ratio", torch.stack(ratios).mean() * self.penalty)


@habit(
    expect=error(r"OwnBackwardClamps\.backward uses the gradients.*gradients\.py:\d+.*on_after_backward"), plain=False
)
class OwnBackwardClamps(Layers):
    """`backward` is overridden, and clamps the gradients that it has computed."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)


@habit(
    expect=error(r"OwnBackwardNotes\.backward changes self\.\w+.*gradients\.py:\d+.*on_after_backward"),
    plain=False,
    observed=["losses"],
)
class OwnBackwardNotes(Layers):
    """`backward` is overridden, and appends the loss to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.losses.append(loss.item())
        loss.backward()


@habit(
    expect=error(r"OwnBackwardOfWeights\.backward gives backward the inputs.*gradients\.py:\d+.*requires_grad"),
    plain=False,
)
class OwnBackwardOfWeights(Layers):
    """`backward` is overridden, and computes the gradients of weights alone."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(inputs=[parameter for name, parameter in self.named_parameters() if "weight" in name])


@habit(expect=error(r"OwnBackwardOfTheHead\.backward gives backward the inputs.*gradients\.py:\d+"), plain=False)
class OwnBackwardOfTheHead(Layers):
    """Likewise of parameters of the last stage alone, by torch's function."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.autograd.backward(loss, inputs=list(self.head.parameters()))


@habit(plain=False)
class TheWayOutOfInputs(Layers):
    """What that error tells to do instead."""

    def on_train_start(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("weight" in name)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


@habit()
class OnlyTheHeadLearns(Layers):
    """An earlier layer is used after a later one, and its result in no_grad: it has no gradients, not zeros."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[3](x))
        with torch.no_grad():
            return x + self.layers[2](x)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


@habit()
class DifferentiatesWhatWasSelected(Layers):
    """autograd.grad goes back over rows that a mask of data has selected, and written into."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.features(x)
        given = hidden.detach().requires_grad_()
        chosen = given[given[:, 0] > 0] ** 2
        rest = given.clone()
        rest[given[:, 1] > 0] = 0.5
        (gradient,) = torch.autograd.grad(chosen.sum() + rest.square().sum(), given)
        return F.cross_entropy(self.head(hidden + 0.1 * gradient), y)


@habit(expect=error(r"gradient of a tensor is read within a step.*gradients\.py:\d+"), plain=False, shows=False)
class ReadsGradientOfItsBatch(Layers):
    """A backward of one's own to what the batch gave, whose gradient is read."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        given = x.detach().requires_grad_()
        self.layers[2](given).sum().backward()
        return F.cross_entropy(self(x + 0.1 * given.grad), y)


@habit()
class DifferentiatesByAView(Layers):
    """autograd.grad with respect to what was made from the batch, of which a frozen layer is given a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        given = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.conv(given.view(-1, 2, 4)).square().sum(), given)
        return F.cross_entropy(self(x + gradient), y)


@habit(shows=False, plain=False, observed=("found",))
class HookedAndUsedWithoutGradients(Noting):
    """A weight with a hook on its gradient takes part once more under no_grad, and in a second loss of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers[1].linear.weight.register_hook(lambda gradient: self.found.append(gradient.norm()))

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[3](self.layers[2](self.layers[1](self.layers[0](x))))
        with torch.no_grad():
            return x + self.layers[1](x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        x, y = batch
        for forward in (self.features, self.layers[1]):
            self.manual_backward(F.cross_entropy(self.head(forward(x)), y))
            optimizer.step()
            optimizer.zero_grad()
