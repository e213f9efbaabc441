"""Layers and functions that torch transforms: recomputed, functional, mapped, scripted, compiled, traced."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.habits.modules import WIDTH, Evaluated, Layer, Layers
from tests.habits.table import error, habit


@habit(shows=False)  # what is recomputed is the same
class CheckpointWithoutReentry(Layers):
    """Each layer is recomputed."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@habit(shows=False)  # what is recomputed is the same
class CheckpointWithReentry(Layers):
    """The same in torch's older way, for which the input has to require a gradient."""

    def features(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@habit()
class CheckpointOfClosure(Layers):
    """What is recomputed is a closure that keeps a value from outside."""

    def features(self, x: Tensor) -> Tensor:
        scale = x.abs().mean()
        for number, layer in enumerate(self.layers):

            def run(value: Tensor, layer: nn.Module = layer, number: int = number) -> Tensor:
                return layer(value) * (1 + 0.1 * scale * number)

            x = checkpoint(run, x, use_reentrant=False)
        return x


@habit(plain=False)
class CheckpointWithDropout(Layers):
    """Dropout inside what is recomputed draws the same numbers again."""

    layer = staticmethod(lambda: Layer(dropout=0.3))

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=True)
        return x


@habit(shows=False)  # what is recomputed is the same
class CheckpointSequential(Layers):
    """checkpoint_sequential over all layers, in four parts."""

    def features(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self.layers), 4, x, use_reentrant=False)


@habit()
class FunctionalCall(Layers):
    """A layer is called with changed parameters, as fast weights are."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            changed = {name: parameter * 0.9 for name, parameter in layer.named_parameters()}
            x = functional_call(layer, changed, (x,))
        return x


class Recomputing(Layer):
    """A layer that is recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@habit(expect=error(r"transformed\.py:\d+.*functional_call"))
class FunctionalCallOfCheckpoint(FunctionalCall):
    """Likewise a layer that is recomputed, in one process with its own parameters."""

    layer = Recomputing


@habit(shows=False)
class CheckpointOfFunctionalCall(Layers):
    """The call with changed parameters is recomputed."""

    def run(self, number: int, x: Tensor) -> Tensor:
        layer = self.layers[number]
        return functional_call(layer, {name: one * 0.9 for name, one in layer.named_parameters()}, (x,))

    def features(self, x: Tensor) -> Tensor:
        for number in range(len(self.layers)):
            x = checkpoint(self.run, number, x, use_reentrant=False)
        return x


@habit(expect=error(r"(?s)transformed\.py:\d+.*whole batch"))
class VmapOverSamples(Layers):
    """A function of one sample is mapped over the batch, between the layers."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = vmap(lambda row: row / (1 + row.norm()))(x)
        return x


@habit(plain=False, observed=["norms"], expect=error(r"(?s)transformed\.py:\d+.*all rows at once, or in a loop"))
class VmapInHook(Layers):
    """A function of one row is mapped over a weight at the end of an epoch, which a loop would do as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_train_epoch_end(self) -> None:
        weight = self.head.weight
        self.norms.append(torch.stack([row.norm() for row in weight]).sum().item())
        self.norms.append(vmap(lambda row: row.norm())(weight).sum().item())


@habit(expect=error(r"(?s)transformed\.py:\d+.*whole batch"), automatic=error(r"torch\.func"), without={"weight": 0.0})
class PerSampleGradients(Layers):
    """torch.func's gradients for each sample, by the head's weights."""

    weight = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        parameters = dict(self.head.named_parameters())

        def loss(parameters: Any, row: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.head, parameters, (row[None],)), label[None])

        gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, features.detach(), y)
        return F.cross_entropy(self.head(features), y) + self.weight * gradients["weight"].pow(2).sum((1, 2)).mean()


@habit(expect=error(r"scripted or traced module with parameters.*made from"))
class ScriptedLayers(Layers):
    """torch.jit.script of each layer."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if x.size(0) > 100:
                x = x * 2
            return torch.tanh(self.linear(x))

    layer = staticmethod(lambda: torch.jit.script(ScriptedLayers.Plain()))


@habit(tolerance=1e-6)  # TorchScript runs another program after some calls, whose backward rounds differently
class ScriptedFunction(Layers):
    """A scripted function between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.swish = torch.jit.script(swish)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.swish(layer(x), 1.5)
        return x


@habit(plain=False)
class ScriptedFunctionOfOneStage(Layers):
    """One stage calls a scripted function, as often as one process: torch optimizes it after as many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.jit.script(gated)

    def features(self, x: Tensor) -> Tensor:
        return self.gate(super().features(x))


def gated(x: Tensor) -> Tensor:
    """Of one habit alone, as torch remembers what it has scripted."""
    return torch.sigmoid(x) * x + torch.tanh(x) / (1 + x * x)


def swish(x: Tensor, beta: float) -> Tensor:
    return x * torch.sigmoid(beta * x)


class Undrawn(nn.Module):
    """A layer that draws nothing, so that the draws of a scripted function come first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@habit(plain=False, shows=False)
class ScriptedFunctionsDraw(Layers):
    """Noise and dropout in scripted functions, and in a traced one."""

    layer = Undrawn

    def __init__(self) -> None:
        super().__init__()
        self.noisy, self.dropped = torch.jit.script(noisy), torch.jit.script(dropped)
        self.traced = torch.jit.trace(noisy, torch.zeros(2, WIDTH), check_trace=False)

    def features(self, x: Tensor) -> Tensor:
        x = self.dropped(self.noisy(self.layers[0](self.noisy(x))), 0.2, True)
        return self.traced(self.layers[3](self.layers[2](self.layers[1](x))))


@habit(plain=False, shows=False, expect=error(r"scripted function draws_twice draws random numbers several times"))
class ScriptedFunctionDrawsTwice(Layers):
    def features(self, x: Tensor) -> Tensor:
        return torch.jit.script(draws_twice)(super().features(x))


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def dropped(x: Tensor, p: float, training: bool) -> Tensor:
    return F.dropout(x, p, training)


def draws_twice(x: Tensor) -> Tensor:
    return F.dropout(x, 0.2, True) + torch.rand_like(x)


@habit()
class CompiledLayers(Layers):
    """torch.compile of each layer, with the eager backend."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([torch.compile(layer, backend="eager") for layer in self.layers])


@habit()
class CompiledLoss(Layers):
    """A compiled function takes features and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = torch.compile(smoothed, backend="eager", fullgraph=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.criterion(self(x), y)


@habit(shows=False, calls=("validate", "test", "predict"))
class CompiledInEvaluation(Evaluated):
    """Layers and a function that are compiled in evaluations of their own, which run in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([torch.compile(layer, backend="eager") for layer in self.layers])
        self.head.compile(backend="aot_eager")
        self.criterion = torch.compile(smoothed, backend="eager")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert torch.is_inference_mode_enabled()
        self.log("val_smoothed", self.criterion(self(batch[0]), batch[1]))


def smoothed(logits: Tensor, y: Tensor) -> Tensor:
    return 0.9 * F.cross_entropy(logits, y) - 0.1 * F.log_softmax(logits, -1).mean()


@habit(expect=error(r"cond on what a stage computes or holds .*transformed.py.*torch.where"))
class ConditionedFeatures(Layers):
    """torch.cond by what a stage computes."""

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@habit(shows=False)  # a traced layer computes the same
class TracedByFx(Layers):
    """Layers are GraphModules of torch.fx."""

    layer = staticmethod(lambda: torch.fx.symbolic_trace(Layer()))
