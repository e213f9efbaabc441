"""What hooks give to torch's compiler, to TorchScript, exporters and quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.jit import trace

from tests.habits.modules import WIDTH, Evaluated, Normed, Noting
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


@habit(observed=["found"], shows=False)
class ConvertedInHooks(Noting):
    """The module, with batch norms, is traced, exported and quantized; a layer is scripted."""

    layer = Normed

    def on_train_epoch_end(self) -> None:
        x = torch.ones(2, self.width)
        torch.jit.trace(self, x, check_trace=False)  # in training mode, which changes statistics
        exported = torch.export.export(self.eval(), (self.layers[0](x).detach(),))
        made = [
            torch.jit.trace(self, x),
            trace(self.layers[3], x),
            exported.module(),
            torch.jit.script(self.layers[3].linear),
        ]
        made += [quantize_dynamic(self, {nn.Linear}, dtype=torch.qint8)]
        self.found += [each(x).detach() for each in made]
        self.found.append(torch.quantize_per_tensor(self.head.weight.detach(), 0.1, 0, torch.qint8).dequantize())
        self.train()


@habit(observed=["found"], shows=False)
class TracedByFirstRank(Evaluated):
    """The first rank alone traces the module in a validation hook, and all load what it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_validation_epoch_end(self) -> None:
        path, x = Path(self.trainer.default_root_dir) / "traced.ts", torch.ones(2, self.width)
        if self.trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            trace(self, x).save(path)
        self.trainer.strategy.barrier()
        self.found.append(torch.jit.load(path)(x).detach())
        self.trainer.strategy.barrier()
        path.unlink(missing_ok=True)  # its bytes are others each time
