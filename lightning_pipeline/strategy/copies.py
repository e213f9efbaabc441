"""Copies of the module: those that callbacks keep, such as averaged weights, which are released and saved as the module
itself, and the one with all weights that a user asks for."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_pipeline.partition.guards import unguard
from lightning_pipeline.partition.ownership import Ownership, holders_of, named_tensors
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.runtime.fully_sharded import whole
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.trees import recv_tree, send_tree

from .._lightning import LightningModule, Trainer


def copies_of(module: LightningModule, trainer: Trainer) -> Iterator[nn.Module]:
    """Every copy of `module` that a callback has as an attribute, by itself or as an `AveragedModel`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for value in list(vars(callback).values()):
            candidate = value.module if isinstance(value, AveragedModel) else value
            if type(candidate) is type(module) and candidate is not module:
                # Callbacks move their copy to the device with `to`, which refuses what is not here.
                vars(candidate)["to"] = functools.partial(_move_what_is_here, candidate)
                yield candidate


def filled_from_owners(checkpoint: dict[str, Any], ownership: Ownership, transport: Transport | None) -> dict[str, Any]:
    """The checkpoint, on stage 0 with the data of other stages' tensors that callbacks and hooks have put into it.

    All stages must call it, each with the same checkpoint as its own callbacks made it.
    """
    if transport is None:
        return checkpoint
    missing = []
    if ownership.stage == 0:
        for path, tensor in _tensors(checkpoint):
            if type(tensor) is Placeholder:
                stages = holders_of(tensor) or ownership.holders.get(str(path[-1]), (0,))
                missing.append((path, stages[0]))
    found: dict[tuple[Any, ...], Tensor] = {}
    for path, owner in transport.broadcast_object(missing, 0, "names of missing checkpoint entries"):
        if ownership.stage == owner:
            entry: Any = checkpoint
            for key in path:
                entry = entry[key]
            send_tree(entry, transport, 0)
        elif ownership.stage == 0:
            found[path] = recv_tree(transport, owner, f"checkpoint entry {path}")
    if ownership.stage == 0:
        # Without the note of who holds them, which is of no use in a file.
        noted = {
            path: tensor.detach() for path, tensor in _tensors(checkpoint) if path not in found and holders_of(tensor)
        }
        checkpoint = _with(checkpoint, (), {**noted, **found})
    return checkpoint


def _tensors(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in nested dictionaries, lists and tuples, each with its keys."""
    if isinstance(content, Tensor):
        return [(path, content)]
    items = content.items() if isinstance(content, dict) else enumerate(content) if _is_list(content) else ()
    return [found for key, value in items for found in _tensors(value, (*path, key))]


def _with(content: Any, path: tuple[Any, ...], new: dict[tuple[Any, ...], Tensor]) -> Any:
    """The content with other tensors, in containers of its own: those of a checkpoint may be the user's."""
    if path in new:
        return new[path]
    if not any(key[: len(path)] == path for key in new):
        return content
    if isinstance(content, dict):
        made = copy.copy(content)
        for key, value in content.items():
            made[key] = _with(value, (*path, key), new)
        return made
    return type(content)([_with(value, (*path, index), new) for index, value in enumerate(content)])


def _is_list(content: Any) -> bool:
    return type(content) in (list, tuple)


def _move_what_is_here(module: nn.Module, device: torch.device) -> nn.Module:
    return module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


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
