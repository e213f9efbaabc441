"""Layers and weights that get other names during training: pruned, wrapped, parametrized, inserted, exchanged."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_weight_norm, weight_norm

from tests.habits.modules import WIDTH, Evaluated, Layer, Layers
from tests.habits.table import habit


class WithAdam(Layers):
    """With an optimizer that has states, which checkpoints hold by the places of parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@habit(epochs=3, plain=False)
class PrunedEachEpoch(WithAdam):
    """`prune.l1_unstructured` at the end of each epoch: weights become `weight_orig` and a mask."""

    def on_train_epoch_end(self) -> None:
        for layer in self.layers:
            prune.l1_unstructured(layer.linear, "weight", amount=0.2)


@habit(epochs=3, plain=False)
class PrunedForTheSecondEpoch(WithAdam):
    """Pruned by the weights of all stages, and made permanent after an epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            everywhere = [(layer.linear, "weight") for layer in self.layers]
            prune.global_unstructured(everywhere, pruning_method=prune.L1Unstructured, amount=0.3)
        if self.current_epoch == 2:
            for layer in self.layers:
                prune.remove(layer.linear, "weight")


@habit(callbacks=lambda: [ModelPruning("l1_unstructured", amount=0.2, verbose=0)], plain=False)
class PrunedByLightning(Evaluated):
    """Lightning's own callback."""


class LoRA(nn.Module):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


@habit(plain=False)
class AdaptersFromSecondEpoch(WithAdam):
    """Adapters are put around linear layers in mid-run, with a new optimizer for them."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for layer in self.layers:
                layer.linear = LoRA(layer.linear)
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            self.trainer.optimizers = [torch.optim.Adam(trained, lr=0.01)]


@habit(plain=False)
class AdaptersMergedAtTheEnd(WithAdam):
    """Adapters from the start are added to the weights when training ends."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear = LoRA(layer.linear)

    def on_train_end(self) -> None:
        for layer in self.layers:
            adapter = layer.linear
            adapter.base.weight.data += adapter.up @ adapter.down
            layer.linear = adapter.base


class Gated(nn.Module):
    """A layer with a gate."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gate


@habit(trainer={"gradient_clip_val": 0.1}, plain=False)
class LayersWrapped(WithAdam):
    """Layers, of which some have keys, are wrapped, and the optimizer gets what is new; clipped by norm."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for place, layer in enumerate(self.layers):
                self.layers[place] = Gated(layer)
            self.optimizers().add_param_group({"params": [layer.gate for layer in self.layers], "lr": 0.05})


@habit(trainer={"gradient_clip_val": 0.1}, epochs=3, plain=False)
class LayersInserted(WithAdam):
    """Layers are put before and between others."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            new = Layer()
            self.layers.insert(2 * (self.current_epoch - 1), new)
            self.optimizers().add_param_group({"params": list(new.parameters())})


@habit(trainer={"gradient_clip_val": 0.1}, plain=False)
class FirstLayerDropped(WithAdam):
    """The first layer goes, and the others move up; the optimizer still has it."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            del self.layers[0]


@habit(epochs=3, plain=False)
class LayersExchanged(WithAdam):
    """Layers of different stages change places."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0], self.layers[3] = self.layers[3], self.layers[0]
        if self.current_epoch == 2:
            self.layers = nn.ModuleList(reversed(self.layers))


@habit(epochs=3, plain=False)
class MovedAndReplaced(WithAdam):
    """A layer moves, and another one, of which the optimizer hears, comes in its place."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[3] = self.layers[1]
            self.layers[1] = Layer()
            self.optimizers().add_param_group({"params": list(self.layers[1].parameters())})


@habit(plain=False)
class WeightNormRemoved(WithAdam):
    """`remove_weight_norm` when training ends, as vocoders do."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear = weight_norm(layer.linear)

    def on_train_end(self) -> None:
        for layer in self.layers:
            remove_weight_norm(layer.linear)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@habit(epochs=3, plain=False)
class ParametrizedForTheSecondEpoch(Layers):
    """A parametrization is registered in mid-run, and removed an epoch later."""

    def on_train_epoch_start(self) -> None:
        for layer in self.layers:
            if self.current_epoch == 1:
                parametrize.register_parametrization(layer.linear, "weight", Symmetric())
            if self.current_epoch == 2:
                parametrize.remove_parametrizations(layer.linear, "weight")


@habit(trainer={"gradient_clip_val": 0.1}, epochs=3, plain=False)
class TiedFromSecondEpoch(WithAdam):
    """Layers of two stages get one weight in mid-run; the optimizer still has the other one."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[3].linear.weight = self.layers[0].linear.weight


@habit(epochs=3, plain=False)
class TiedToALaterOne(WithAdam):
    """The earlier layer gets the later one's, and another optimizer."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[1].linear = self.layers[2].linear
            self.trainer.optimizers = [torch.optim.Adam(self.parameters(), lr=0.01)]
