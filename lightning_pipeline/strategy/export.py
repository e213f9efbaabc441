"""The whole module again, out of the stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_pipeline.partition.guards import unguard
from lightning_pipeline.partition.ownership import Ownership, named_tensors
from lightning_pipeline.runtime.fully_sharded import whole
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.trees import recv_tree, send_tree


def gather_module(
    module: LightningModule, ownership: Ownership, transport: Transport | None, *, is_writer: bool
) -> LightningModule | None:
    """On rank 0 a copy of the module with all parameters and buffers, on the CPU. All ranks must call it.

    Args:
        is_writer: this rank's pipeline is the one that rank 0 is in. The others help with what is in slices.
    """
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named_tensors(module):
        tensors.setdefault(id(tensor), (name, tensor))
    copies: dict[int, Any] = {}
    for key, (name, tensor) in tensors.items():
        value = _on_rank_0(name, tensor, ownership, transport, is_writer=is_writer)
        if value is not None:
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[key] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    if ownership.stage != 0 or not is_writer:
        return None
    with _without_fsdp(module):
        whole_module = copy.deepcopy(module, copies)
    _strip(whole_module)
    return whole_module


def _on_rank_0(
    name: str, tensor: Tensor, ownership: Ownership, transport: Transport | None, *, is_writer: bool
) -> Tensor | None:
    """The whole tensor on rank 0, None elsewhere."""
    owner = ownership.owner(name) if name in ownership else 0
    if ownership.stage == owner:
        if is_writer or isinstance(tensor, DTensor):
            tensor = whole(tensor)
        if owner == 0:
            return tensor.detach().to("cpu", copy=True) if is_writer else None
        if is_writer:
            assert transport is not None
            send_tree(tensor, transport, 0)
    elif ownership.stage == 0 and is_writer:
        assert transport is not None
        return recv_tree(transport, owner, f"{name} of the whole module")
    return None


@contextmanager
def _without_fsdp(module: nn.Module) -> Iterator[None]:
    """FSDP2 gives a module a class that refuses copies, and a state that refers to process groups."""
    before = [(sub, type(sub), dict(vars(sub))) for sub in module.modules() if isinstance(sub, FSDPModule)]
    for sub, cls, attributes in before:
        sub.__class__ = next(base for base in cls.__mro__[1:] if base is not FSDPModule)
        for key in attributes:
            if key.startswith("__composable_api"):
                del vars(sub)[key]
    try:
        yield
    finally:
        for sub, cls, attributes in before:
            sub.__class__ = cls
            vars(sub).update(attributes)


def _strip(module: nn.Module) -> None:
    """Take off what belongs to a module in stages."""
    for sub in module.modules():
        unguard(sub)
        for hooks in (sub._state_dict_pre_hooks, sub._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    del hooks[key]
