"""Tensors, and nested values with tensors, between any two ranks of a pipeline."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.partition.memory import contiguous_strides
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.runtime.backends import bytes_of, is_dense
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.tensor_meta import conform, from_memory, laid_out, wire
from lightning_pipeline.runtime.transport import Transport


class DirectTransport:
    """Sends and receives tensors whose specs both sides know.

    Args:
        device: where received ones go.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device

    @property
    def rank(self) -> int:
        """This rank's place in the pipeline."""
        return self._transport.stage

    def tell(self, what: Any) -> None:
        """Give every other rank an object."""
        for peer in range(self._transport.num_stages):
            if peer != self.rank:
                self._transport.send_object(what, peer)

    def tell_one(self, peer: int, what: Any) -> None:
        """Give a rank an object."""
        self._transport.send_object(what, peer)

    def hear(self, peer: int, what: str) -> Any:
        """The next object from a rank."""
        return self._transport.recv_object(peer, what)

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor with dense memory, which must not change until it is sent, or a sparse one."""
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            self._transport.send_object(tensor.cpu(), peer)
        elif tensor.numel():
            self._transport.send_on_control(tensor.cpu().clone(), peer)

    def receive(self, spec: TensorSpec, peer: int, what: str = "a value of a step") -> Tensor:
        """The next tensor from a rank; `what` is what an error calls it."""
        if spec.stride is None:
            return self._transport.recv_object(peer, what).to(self._device)
        meta = wire(spec)
        buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
        if buffer.numel():
            self._transport.receive_on_control(buffer, peer, what)
        return laid_out(buffer.to(self._device), spec.stride)

    def send_as_it_is(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor with its strides, which the receiver does not know. Those count on the CPU alone
        (`gradient_strides`); from other devices it goes contiguous."""
        if tensor.layout is torch.strided:
            if tensor.device.type == "cpu" and tensor.ndim:
                self._transport.send_on_control(torch.tensor(tensor.stride(), dtype=torch.int64), peer)
            if tensor.device.type != "cpu" or not is_dense(tensor):
                tensor = tensor.contiguous()
        self.send(tensor, peer)

    def receive_as_it_was(self, spec: TensorSpec, peer: int, what: str) -> Tensor:
        """The next tensor from a rank, with strides of its own."""
        if spec.stride is None:
            return self.receive(spec, peer, what)
        contiguous = spec.but(stride=contiguous_strides(spec.shape))
        if self._device.type != "cpu" or not spec.shape:
            return laid_out(self.receive(contiguous, peer, what), spec.stride)
        strides = torch.empty(len(spec.shape), dtype=torch.int64)
        self._transport.receive_on_control(strides, peer, what)
        return from_memory(self.receive(contiguous, peer, what), tuple(strides.tolist()))

    def spread(self, tensor: Tensor | None, spec: TensorSpec, owner: int) -> Tensor:
        """One rank's tensor, on every rank."""
        if tensor is None:
            return self.receive(spec, owner)
        dense = conform(tensor, spec)
        for peer in range(self._transport.num_stages):
            if peer != owner:
                self.send(dense, peer)
        return tensor


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
                dist.send(bytes_of(data), group_dst=peer, group=wire.control_group)


def recv_tree(wire: Wire, peer: int, what: str) -> Any:
    """Receive what ``send_tree`` sent from ``peer``, with tensors on the CPU."""

    def fill(slot: _Slot) -> Tensor:
        tensor = torch.empty(slot.shape, dtype=slot.dtype)
        if tensor.numel():
            with waiting_for(what):
                dist.recv(bytes_of(tensor), group_src=peer, group=wire.control_group)
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
