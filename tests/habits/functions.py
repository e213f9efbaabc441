"""Autograd functions of the user's that work with more of Python than their arguments: only one stage runs them, and
later than the step's Python."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import CLASSES, WIDTH, Layers
from tests.habits.table import error, habit


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norms: list[float]) -> Tensor:  # type: ignore[override]
        ctx.norms = norms
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.norms.append(float(gradient.norm()))
        return gradient, None


@habit(
    expect=error(r"Noting\.backward changes its argument list.*functions\.py:\d+.*register_hook"),
    observed=["norms"],
    plain=False,
)
class BackwardNotesNorms(Layers):
    """The backward of a function appends to a list that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(Noting.apply(self.features(x), self.norms)), y)


calls = {"forward": 0}


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        calls["forward"] += 1
        return x * 1.01

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1.01


@habit(expect=error(r"Counting\.forward changes calls.*functions\.py:\d+.*in the step"), plain=False)
class ForwardCountsInGlobal(Layers):
    """A function counts its calls in a dictionary of the file."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Counting.apply(layer(x))
        return x


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, options: Any) -> Tensor:  # type: ignore[override]
        ctx.options = options
        return x * options.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.options.scale, None


@habit(plain=False)
class OptionsOfTheEpoch(Layers):
    """A function takes its scale from an object, in which hooks change it."""

    def __init__(self) -> None:
        super().__init__()
        self.options = SimpleNamespace(scale=0.8)

    def on_train_epoch_start(self) -> None:
        self.options.scale -= 0.2 * self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(Scaling.apply(self.features(x), self.options)), y)


@habit(
    expect=error(r"Scaling uses its argument SimpleNamespace\.scale, which is another one now.*functions\.py:\d+"),
    plain=False,
)
class OptionsOfTheStep(OptionsOfTheEpoch):
    """The step itself changes it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.options.scale += 0.05
        return super().training_step(batch, batch_idx)


class Scaled(torch.autograd.Function):
    """Takes nested options."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: Any) -> Tensor:
        ctx.factor = options["factors"][1][0]
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


@habit(plain=False, shows=False)
class FunctionTakesNestedOptions(Layers):
    def features(self, x: Tensor) -> Tensor:
        return super().features(Scaled.apply(super().features(x), {"factors": (1, [1.5, (2, 3)])}))


@habit(plain=False, shows=False)
class ComparesWithNone(Layers):
    """`==` and `in` with None and strings, in the step and in a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss == None or loss in [None] or self.layers[0].linear.weight == "none":  # noqa: E711
            return None
        return loss * (2 if loss != None and loss not in ("none", None) else 1)  # noqa: E711

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("is_none", float(self.head.weight == None or self.layers[0].linear.weight in [None]))  # noqa: E711


@habit(plain=False, shows=False)
class DataChangedTwice(Layers):
    """`x.data *= 0.5; x.data += 0.1`, of what each layer gives."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).clone()
            x.data *= 0.5
            x.data += 0.1
        return x


@habit(plain=False, shows=False)
class TwoDetachedLeaves(Layers):
    """Two penalties on gradients, each with respect to a detached leaf of the same features."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        loss = F.cross_entropy(self.head(hidden), batch[1])
        for leaf in (hidden.detach().requires_grad_(), hidden.detach().requires_grad_()):
            [gradient] = torch.autograd.grad(self.head(leaf).pow(2).sum(), leaf, create_graph=True)
            loss = loss + 0.1 * gradient.norm()
        return loss


@habit(plain=False, shows=False)
class AsksForNameOfClass(Layers):
    """The step goes on by the name of a tensor's class, and of its module."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        if type(hidden).__name__ == "Tensor" and str(type(hidden)) == "<class 'torch.Tensor'>":
            hidden = hidden * 0.5
        return F.cross_entropy(self.head(hidden), batch[1])


class Calling(torch.autograd.Function):
    """Calls a module, and gives its parameters their gradients in backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            found: Tensor = layer(x)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


@habit(plain=False, shows=False, expect=error(r"Calling\.backward gives parameters.*itself.*functions\.py:\d+.*return"))
class FunctionTrainsModule(Layers):
    """A layer of no stage in particular is trained by the backward of a function that is given it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Calling.apply(super().forward(x), self.extra)
        return found


@habit(plain=False, shows=False, expect=error(r"Calling\.(apply is given a module|backward (gives|draws)).*\.py:\d+"))
class FunctionCallsLayer(Layers):
    """The same for one of the layers, which a stage holds."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = Calling.apply(x, layer) + x if number == 2 else layer(x)
        return x


class Recomputed(torch.autograd.Function):
    """Checkpointing of guided-diffusion's."""

    @staticmethod
    def forward(ctx: Any, run: Any, length: int, *args: Any) -> Any:
        ctx.run, ctx.inputs, ctx.parameters = run, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.inputs = [one.detach().requires_grad_(True) for one in ctx.inputs]
        with torch.enable_grad():
            outputs = ctx.run(*[one.view_as(one) for one in ctx.inputs])
        found = torch.autograd.grad(outputs, ctx.inputs + ctx.parameters, gradients, allow_unused=True)
        return None, None, *found


@habit(plain=False, shows=False, expect=error(r"Recomputed\.(apply is given a module|backward draws).*\.py:\d+"))
class CheckpointingOfGuidedDiffusion(Layers):
    """Layers are recomputed by a function that gets a bound method and their parameters."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Recomputed.apply(layer.forward, 1, x, *layer.parameters())
        return x


class Integrated(torch.autograd.Function):
    """A flow along a module by Euler's method, with the adjoint equation in backward (Chen et al., 2018)."""

    @staticmethod
    def forward(ctx: Any, flow: nn.Module, x: Tensor, times: Any, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            for before, after in pairwise(times):
                assert after > before
                x = x + (after - before) * flow(x)
        ctx.flow, ctx.times = flow, times
        ctx.save_for_backward(x, *weights)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        sums = [torch.zeros_like(weight) for weight in weights]
        for after, before in pairwise(reversed(ctx.times)):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                slope = ctx.flow(x)
                found = torch.autograd.grad(slope, (x, *weights), gradient)
            step = after - before
            x = x - step * slope
            gradient = gradient + step * found[0]
            sums = [one + step * other for one, other in zip(sums, found[1:], strict=True)]
        return None, gradient, None, *sums


class Flow(nn.Module):
    """What a stage holds, called by a function that is given it with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))) * self.scale


class FlowByAdjoint(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()

    def chain(self) -> list[str]:
        return ["layers.0", "layers.1", "flow", "layers.2", "layers.3"]

    def features(self, x: Tensor) -> Tensor:
        x = self.integrated(self.layers[1](self.layers[0](x)))
        return self.layers[3](self.layers[2](x))


@habit(shows=False)
class NeuralODE(FlowByAdjoint):
    """On times that are numbers."""

    def integrated(self, x: Tensor) -> Tensor:
        return Integrated.apply(self.flow, x, [0.0, 0.25, 0.5, 1.0], *self.flow.parameters())


class Settled(torch.autograd.Function):
    """The way to where a module leads, as long as its weights make it."""

    @staticmethod
    def forward(ctx: Any, flow: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        with torch.no_grad():
            found = [flow(x)]
            while len(found) < 9 and float(flow(found[-1]).norm()) > 0.1:
                found.append(flow(found[-1]))
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient.sum(0), *(weight * len(gradient) for weight in ctx.saved_tensors)


@habit(shows=False)
class WayOfALengthOfItsOwn(FlowByAdjoint):
    """The shape of what the function gives depends on the weights that a stage holds."""

    def integrated(self, x: Tensor) -> Tensor:
        return x + Settled.apply(self.flow, x, *self.flow.parameters()).mean(0)


@habit(shows=False)
class NeuralODEOfTheStage(FlowByAdjoint):
    """On times that a stage computes, in reach of the function alone."""

    def integrated(self, x: Tensor) -> Tensor:
        times = torch.cat([x.new_zeros(1), x.detach().abs().mean()[None] + 0.5, x.new_full((1,), 3.0)])
        return Integrated.apply(self.flow, x, times, *self.flow.parameters())


class _Put(torch.autograd.Function):
    """Writes into an argument, of which autograd does not hear, as the solvers of torchdiffeq do."""

    @staticmethod
    def forward(ctx: Any, scratch: Tensor, value: Tensor, index: Any) -> Tensor:
        ctx.index = index
        scratch.data[index] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad[ctx.index], None


class _Moving(torch.autograd.Function):
    """Keeps a running mean in a buffer, by its data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


@habit()
class FunctionPutsByData(Layers):
    """A solver that adapts its steps: each of its calls writes into a tensor that the step has made."""

    def features(self, x: Tensor) -> Any:
        x = self.layers[1](self.layers[0](x))
        k = torch.empty(*x.shape, 3)
        k = _Put.apply(k, x, (..., 0))
        if k[..., 0].abs().max() > 100:
            x = x / 2
        for place in (1, 2):
            k = _Put.apply(k, self.layers[2](k[..., :place].sum(-1)), (..., place))
        return self.layers[3](k.sum(-1))


@habit(observed=["mean"])
class FunctionMovesBufferByData(Layers):
    """A norm of one's own, whose function moves the running mean that the step uses afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def features(self, x: Tensor) -> Any:
        x = _Moving.apply(self.layers[1](self.layers[0](x)), self.mean)
        return self.layers[3](self.layers[2](x)) + self.mean
