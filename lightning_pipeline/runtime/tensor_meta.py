"""How tensors travel between ranks: what receivers know of them, and several of them packed into one message."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.partition.memory import begun_at, contiguous_strides, laid_out
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.runtime.backends import are_dense, bytes_of, flat, is_dense

EVERYWHERE_BYTES = 1 << 16
"""Tensors up to this size go to every rank, which then all compute what takes no parameters."""


class TensorMeta(NamedTuple):
    """What a receiver has to know to allocate a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        """The meta with which `tensor` arrives: its own strides if its memory is dense, else contiguous ones."""
        shape = tuple(tensor.shape)
        is_sent_as_it_is = tensor.is_contiguous() or is_dense(tensor)
        return TensorMeta(shape, tensor.stride() if is_sent_as_it_is else contiguous_strides(shape), tensor.dtype)


@cache
def wire(spec: TensorSpec) -> TensorMeta:
    """The meta with which a tensor of this spec arrives."""
    assert spec.stride is not None
    return TensorMeta.of(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta"))


def conform(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """`tensor` with the strides that its receiver expects; a sparse one as it is.

    Raises:
        RuntimeError: its shape or dtype is not that of `spec`.
    """
    if spec.stride is None:
        return tensor
    meta = wire(spec)
    if tensor.stride() == meta.stride and tensor.shape == spec.shape and tensor.dtype is spec.dtype:
        return tensor
    if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
        raise RuntimeError(
            f"a stage made a tensor of shape {list(tensor.shape)} and {tensor.dtype} where torch says that it would be "
            f"{list(spec.shape)} and {spec.dtype}"
        )
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=tensor.device).copy_(tensor.detach())


def device_of(spec: TensorSpec, own: torch.device) -> torch.device:
    """Where a rank has a value of this spec, which may come from one with another device."""
    return spec.device if spec.device.type == "cpu" else own


def arrived(tensor: Tensor, spec: TensorSpec, begin: int = 0) -> Tensor:
    """What `spec` says, made of a tensor that came in dense memory; to the host where the stage has it there.

    Args:
        begin: where the stage has it in memory (`memory.beginning`).
    """
    if spec.device.type == "cpu" and not tensor.is_cpu:
        tensor = tensor.cpu()
    found = laid_out(tensor, spec.stride)
    return begun_at(found, begin) if begin else found


def from_memory(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The tensor of these strides whose memory has come into contiguous memory."""
    if are_dense(tensor.shape, stride):
        return tensor.as_strided(tensor.shape, stride)
    return laid_out(tensor, stride)


def zeros_like(spec: TensorSpec) -> Tensor:
    """Zeros that can be sent in place of a tensor of this spec."""
    meta = wire(spec)
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=spec.device).zero_()


_ALIGNMENT = 8
"""In bytes. Every dtype but complex128 can view memory that begins at a multiple of it."""


def num_bytes(specs: Sequence[TensorSpec]) -> int:
    """The size of a message that holds values of these specs."""
    return sum(map(_padded, specs))


def places(specs: Sequence[TensorSpec]) -> Iterator[slice]:
    """The place of each value in a message."""
    start = 0
    for spec in specs:
        yield slice(start, start + spec.num_bytes)
        start += _padded(spec)


def as_bytes(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """A value's memory as it travels."""
    return bytes_of(flat(conform(tensor.detach(), spec)))


def from_bytes(content: Tensor, spec: TensorSpec, begin: int = 0) -> Tensor:
    """The value in a part of a message. It shares the message's memory if that lies as it should.

    Args:
        begin: where the stage has it in memory (`memory.beginning`).
    """
    meta = wire(spec)
    if content.storage_offset() % meta.dtype.itemsize:
        content = content.clone()
    return begun_at(laid_out(content.view(meta.dtype).as_strided(meta.shape, meta.stride), spec.stride), begin)


def _padded(spec: TensorSpec) -> int:
    return math.ceil(spec.num_bytes / _ALIGNMENT) * _ALIGNMENT
