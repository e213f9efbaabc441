"""Sends tensors, and nested values with tensors, between any two ranks of a pipeline, outside of its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import contiguous_strides, laid_out
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.runtime.backends import bytes_of, is_dense
from lightning_pipeline.runtime.tensor_meta import conform, device_of, from_memory, wire
from lightning_pipeline.runtime.transport import Transport


class DirectTransport:
    """Sends and receives tensors whose specs both sides know.

    Args:
        transport: to the other stages; None where this rank holds all, and there is nobody to send to.
        device: where received tensors go, but for those that are on the CPU.
    """

    def __init__(self, transport: Transport | None, device: torch.device) -> None:
        self.rank, self.num_ranks = (transport.stage, transport.num_stages) if transport is not None else (0, 1)
        self._to_others = transport
        self.device = device

    @property
    def _transport(self) -> Transport:
        assert self._to_others is not None
        return self._to_others

    def name_of(self, rank: int) -> str:
        """A rank in messages."""
        return self._transport.name_of(rank)

    def tell(self, what: Any) -> None:
        """Send an object to every other rank."""
        for peer in range(self.num_ranks):
            if peer != self.rank:
                self._transport.send_object(what, peer)

    def tell_one(self, peer: int, what: Any) -> None:
        """Send an object to one rank."""
        self._transport.send_object(what, peer)

    def hear(self, peer: int, what: str) -> Any:
        """The next object from a rank."""
        return self._transport.recv_object(peer, what)

    def hear_requests(self, peer: int, what: str) -> Any:
        """The next object from a rank, which ought to be requests of a hook."""
        return self._transport.recv_object(peer, what, takes_requests=True)

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor with dense memory, which must not change until it is sent, or a sparse one."""
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            self._transport.send_object(tensor.cpu(), peer)
        elif tensor.numel():
            self._transport.send_on_control(tensor.cpu().clone(), peer)

    def receive(self, spec: TensorSpec, peer: int, what: str = "a value of a step") -> Tensor:
        """The next tensor from a rank; `what` names it in errors."""
        if spec.stride is None:
            return self._transport.recv_object(peer, what).to(device_of(spec, self.device))
        meta = wire(spec)
        buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
        if buffer.numel():
            self._transport.receive_on_control(buffer, peer, what)
        return laid_out(buffer.to(device_of(spec, self.device)), spec.stride)

    def send_with_strides(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor with its strides, which the receiver does not know.

        Strides matter on the CPU alone (see `gradient_strides`); from other devices the tensor is sent contiguous.
        """
        if tensor.layout is torch.strided:
            if tensor.device.type == "cpu" and tensor.ndim:
                self._transport.send_on_control(torch.tensor(tensor.stride(), dtype=torch.int64), peer)
            if tensor.device.type != "cpu" or not is_dense(tensor):
                tensor = tensor.contiguous()
        self.send(tensor, peer)

    def receive_with_strides(self, spec: TensorSpec, peer: int, what: str) -> Tensor:
        """The next tensor that a rank has sent by `send_with_strides`."""
        if spec.stride is None:
            return self.receive(spec, peer, what)
        contiguous = spec.but(stride=contiguous_strides(spec.shape))
        if spec.device.type != "cpu" or not spec.shape:
            return laid_out(self.receive(contiguous, peer, what), spec.stride)
        strides = torch.empty(len(spec.shape), dtype=torch.int64)
        self._transport.receive_on_control(strides, peer, what)
        return from_memory(self.receive(contiguous, peer, what), tuple(strides.tolist()))

    def spread(self, tensor: Tensor | None, spec: TensorSpec, owner: int) -> Tensor:
        """Give every rank the tensor of its owner; the others pass None."""
        if tensor is None:
            return self.receive(spec, owner)
        dense = conform(tensor, spec)
        for peer in range(self.num_ranks):
            if peer != owner:
                self.send(dense, peer)
        return tensor


class Wire(Protocol):
    """A connection to other ranks, numbered as in its group, which carries tensors on the CPU."""

    def send_object(self, obj: Any, peer: int) -> None: ...
    def recv_object(self, peer: int, what: str) -> Any: ...
    def send_on_control(self, tensor: Tensor, peer: int, *, waits: bool) -> None: ...
    def receive_on_control(self, buffer: Tensor, peer: int, what: str) -> Tensor: ...


@dataclass(frozen=True)
class _Slot:
    """Takes the place of a tensor that is sent next, as bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def send_tree(tree: Any, wire: Wire, peer: int) -> None:
    """Send nested dicts, lists and tuples with tensors: their structure, then one tensor at a time.

    So at most one tensor is copied at once, however large the whole is.
    """
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach().cpu()  # it has no plain bytes, and is pickled with the structure
        tensors.append(tensor)
        return _Slot(tuple(tensor.shape), tensor.dtype)

    wire.send_object(_torch.tree_map_only(Tensor, take, tree), peer)
    for tensor in tensors:
        if tensor.numel():
            data = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
            wire.send_on_control(bytes_of(data), peer, waits=True)


def recv_tree(wire: Wire, peer: int, what: str) -> Any:
    """Receive what ``peer`` has sent by ``send_tree``, with tensors on the CPU."""

    def fill(slot: _Slot) -> Tensor:
        tensor = torch.empty(slot.shape, dtype=slot.dtype)
        if tensor.numel():
            wire.receive_on_control(bytes_of(tensor), peer, what)
        return tensor

    return _torch.tree_map_only(_Slot, fill, wire.recv_object(peer, what))


def to_cpu(tree: Any) -> Any:
    """The same nesting of dicts, lists and tuples with detached tensors on the CPU."""
    return _torch.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)
