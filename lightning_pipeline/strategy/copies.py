"""Copies of the module that callbacks keep, such as averaged weights: released, and saved, as the module itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.trees import recv_tree, send_tree


def copies_of(module: LightningModule, trainer: Trainer) -> Iterator[nn.Module]:
    """Every copy of `module` that a callback has as an attribute, by itself or as an `AveragedModel`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for value in list(vars(callback).values()):
            copy = value.module if isinstance(value, AveragedModel) else value
            if type(copy) is type(module) and copy is not module:
                # Callbacks move their copy to the device with `to`, which refuses what is not here.
                vars(copy)["to"] = functools.partial(_move_what_is_here, copy)
                yield copy


def fill_from_owners(state: dict[str, Any], ownership: Ownership, transport: Transport | None) -> None:
    """Fill in, on stage 0, entries of a checkpoint's `state_dict` that a callback has put there from a copy.

    All stages must call it, each with the same checkpoint as its own callbacks made it.
    """
    if transport is None:
        return
    missing = [
        name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta and name in ownership
    ]
    for name in transport.broadcast_object(missing, 0, "names of missing checkpoint entries"):
        owner = ownership.owner(name)
        if ownership.stage == owner:
            send_tree(state[name], transport, 0)
        elif ownership.stage == 0:
            state[name] = recv_tree(transport, owner, f"checkpoint entry {name!r}")


def _move_what_is_here(module: nn.Module, device: torch.device) -> nn.Module:
    return module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
