"""Nested values with tensors, sent from rank to rank one tensor at a time."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.runtime.failure import waiting_for


class Wire(Protocol):
    """A connection to other ranks, numbered as in its group, which carries tensors in host memory."""

    control_group: dist.ProcessGroup | None

    def send_object(self, obj: Any, peer: int) -> None: ...
    def recv_object(self, peer: int, what: str) -> Any: ...


@dataclass(frozen=True)
class _Slot:
    """Stands in a tree for a tensor that follows as bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def send_tree(tree: Any, wire: Wire, peer: int) -> None:
    """Send nested dicts, lists and tuples with tensors: their structure, then one tensor at a time."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach().cpu()  # has no plain bytes: travels pickled
        tensors.append(tensor)
        return _Slot(tuple(tensor.shape), tensor.dtype)

    wire.send_object(map_tensors(tree, take), peer)
    for tensor in tensors:
        if tensor.numel():
            data = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
            with waiting_for("the receipt of a tensor in host memory"):
                dist.send(_as_bytes(data), group_dst=peer, group=wire.control_group)


def recv_tree(wire: Wire, peer: int, what: str) -> Any:
    """Receive what ``send_tree`` sent from ``peer``, with tensors on the CPU."""

    def fill(slot: _Slot) -> Tensor:
        tensor = torch.empty(slot.shape, dtype=slot.dtype)
        if tensor.numel():
            with waiting_for(what):
                dist.recv(_as_bytes(tensor), group_src=peer, group=wire.control_group)
        return tensor

    return map_tensors(wire.recv_object(peer, what), fill, kind=_Slot)


def to_cpu(tree: Any) -> Any:
    """The same nesting in plain dicts, lists and tuples, with detached tensors on the CPU."""
    return map_tensors(tree, lambda tensor: tensor.detach().cpu())


def map_tensors(tree: Any, function: Callable[[Any], Any], *, kind: type = Tensor) -> Any:
    """The same nesting of dicts, lists and tuples with `function` of each tensor in its place."""
    if isinstance(tree, kind):
        return function(tree)
    if type(tree) in (dict, OrderedDict, defaultdict):
        return {key: map_tensors(value, function, kind=kind) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, function, kind=kind) for value in tree)
    return tree


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor's memory, of any dtype."""
    return tensor.view(-1).view(torch.uint8)
