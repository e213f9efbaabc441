"""A test tool: spoils whatever a stage should not need, so that a use of it cannot pass unnoticed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_pipeline.partition.placeholder import Placeholder


class Poison(L.Callback):
    """Overwrites on each stage what other stages hold, before the first step, and sees that it is let go after it.

    Before any step has run, a stage cannot know who uses an embedding or a head, and keeps it. Here all that it will
    turn out not to hold is NaN (or an index out of every range) already in that first step, so gradients that equal
    the reference's show that the stage did without.

    Args:
        holders: stages that hold each parameter and buffer by name, as an earlier run of the same module found out.
        stage: this stage.
    """

    def __init__(self, holders: Mapping[str, tuple[int, ...]], stage: int) -> None:
        self.holders = dict(holders)
        self.stage = stage
        self.poisoned: list[str] = []
        self.faults: list[str] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, tensor in self._remote(pl_module):
            if is_here(tensor):
                spoil(tensor)
                self.poisoned.append(name)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step != 1:
            return
        self.faults += [f"{name} is still here" for name, tensor in self._remote(pl_module) if is_here(tensor)]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, tensor in tensors(pl_module):
            if trainer.strategy.ownership.is_local(name):
                if not is_here(tensor):
                    self.faults.append(f"{name} is gone")
                elif not is_finite(tensor):
                    self.faults.append(f"{name} is not finite")

    def _remote(self, module: L.LightningModule) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in tensors(module) if self.stage not in self.holders[name])


def tensors(module: L.LightningModule) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def is_here(tensor: Tensor) -> bool:
    """Whether this rank has its data; in a hook, all tensors look as in one process."""
    return not isinstance(tensor, Placeholder)  # while `type` is told otherwise


def is_finite(tensor: Tensor) -> bool:
    """Asked of this rank's own, past the modes that ask every rank."""
    with torch._C.DisableTorchFunction():
        return bool(torch.isfinite(tensor).all())


@torch.no_grad()
def spoil(tensor: Tensor) -> None:
    """Overwrite with NaN; whole numbers with the smallest there is."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
