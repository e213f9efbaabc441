"""What hooks give to torch's compiler, to TorchScript, exporters and quantization."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.habits.modules import WIDTH, Noting
from tests.habits.table import error, habit


class CompiledProbe(L.Callback):
    """Compiles a function within the hook."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            module.log("probed", torch.compile(torch.sum, backend="eager")(module(batch[0])))


@habit(observed=["found"], shows=False, plain=False, callbacks=lambda: [CompiledProbe()])
class CompiledInHooks(Noting):
    """Compiled functions of gradients, of what layers give and of the hook's own tensors."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [torch.compile(scaled, backend="eager", fullgraph=True)(batch[0]), batch[1]]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.compile(lambda gradients: torch.stack([each.norm() for each in gradients]).norm(), backend="eager")
        self.log("norm", norm([p.grad for p in self.parameters()]))

    def on_train_epoch_end(self) -> None:
        self.found.append(torch.cond(torch.ones(()) > 0, torch.sin, torch.cos, (torch.ones(3),)))


def scaled(x: Tensor) -> Tensor:
    return x.sin() * 2


@habit(observed=["found"], shows=False)
class CompiledLayersInHooks(Noting):
    """Compiled layers are called in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = torch.compile(self.layers[0], backend="eager")
        for layer in self.layers[1:]:
            layer.compile(backend="eager")

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.found.append(self(torch.ones(2, self.width)))


@habit(shows=False, expect=error(r"cond on what a stage computes or holds .*converted.py.*torch.where"))
class ConditionedInHook(Noting):
    """torch.cond takes a weight in a hook."""

    def on_train_epoch_end(self) -> None:
        weight = self.layers[0].linear.weight.detach()
        self.found.append(torch.cond(self.head.weight.sum() > 0, torch.sin, torch.cos, (weight,)))


class Activated(nn.Module):
    """A layer with a scripted activation, a scripted module and a traced one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.activation, self.dropout = torch.jit.script(swish), torch.jit.script(nn.Dropout(0.3))
        self.bound = torch.jit.trace(nn.Tanh(), torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.bound(self.dropout(self.activation(self.linear(x), 1.5)))


def swish(x: Tensor, beta: float) -> Tensor:
    return x * torch.sigmoid(beta * x)


# TorchScript runs another program after some calls, whose backward rounds differently.
@habit(observed=["found"], shows=False, plain=False, tolerance=1e-6)
class ScriptedLayersInHooks(Noting):
    """Layers with scripted and traced parts are called in a hook, and a scripted function with a weight."""

    layer = Activated

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.found.append(self(torch.ones(2, self.width)))
            self.found.append(torch.jit.script(swish)(self.head.weight, 2.0).sum().item())
