"""The metadata of tensors that travel between ranks, and several tensors packed into one message."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lightning_pipeline.partition.memory import contiguous_strides
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.runtime.backends import are_dense, bytes_of, flat, is_dense

EVERYWHERE_BYTES = 1 << 16
"""Up to this size a tensor goes to every rank, which then computes with it what takes no parameters."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a receiver has to know to make room for a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """The meta under which `tensor` arrives."""
        shape, stride = wire_layout(tensor)
        return cls(shape, stride, tensor.dtype)


def wire_layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides with which `tensor` arrives: its own if its memory is dense, else contiguous ones."""
    shape = tuple(tensor.shape)
    if tensor.is_contiguous() or is_dense(tensor):
        return shape, tensor.stride()
    return shape, contiguous_strides(shape)


@cache
def wire(spec: TensorSpec) -> TensorMeta:
    """How a tensor of this spec travels."""
    assert spec.stride is not None
    return TensorMeta.of(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta"))


def conform(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """`tensor` with the strides that the receiver made room for; a sparse one as it is.

    Raises:
        RuntimeError: it has another shape or dtype.
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


def laid_out(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """What has come in dense memory, with the strides that it has where it was made, be there holes or repetitions:
    operations add up in an order that depends on them. Where memory overlaps in other ways, it is left as it is."""
    if stride is None or tensor.stride() == stride or not tensor.numel() or not _can_be_filled(tensor.shape, stride):
        return tensor
    repeated = [step == 0 for step in stride]
    sizes = [1 if one else size for one, size in zip(repeated, tensor.shape, strict=True)]
    with torch.no_grad():
        made = tensor.new_empty_strided(sizes, stride)
        made.copy_(tensor[tuple(slice(0, 1) if one else slice(None) for one in repeated)])
        return made.as_strided(tensor.shape, stride)


def from_memory(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """What has come into contiguous memory from a tensor of these strides."""
    if are_dense(tensor.shape, stride):
        return tensor.as_strided(tensor.shape, stride)
    return laid_out(tensor, stride)


def _can_be_filled(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether no two elements share memory but for those along dimensions that repeat one."""
    extent = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if step and size > 1):
        if step <= extent:
            return False
        extent += step * (size - 1)
    return True


def zeros_like(spec: TensorSpec) -> Tensor:
    """Zeros as they travel in the place of a tensor of this spec."""
    meta = wire(spec)
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=spec.device).zero_()


_ALIGNMENT = 8
"""Bytes; every dtype can view what begins at a multiple of them."""


def num_bytes(specs: Sequence[TensorSpec]) -> int:
    """The size of a message."""
    return sum(map(_padded, specs))


def places(specs: Sequence[TensorSpec]) -> Iterator[slice]:
    """Where the values are in a message."""
    start = 0
    for spec in specs:
        yield slice(start, start + spec.num_bytes)
        start += _padded(spec)


def as_bytes(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """A value's memory as it travels, on the host."""
    return bytes_of(flat(conform(tensor.detach(), spec).cpu()))


def from_bytes(content: Tensor, spec: TensorSpec) -> Tensor:
    """The value in a part of a message, on the host. It shares the message's memory, where that is laid out alike."""
    meta = wire(spec)
    return laid_out(content.view(meta.dtype).as_strided(meta.shape, meta.stride), spec.stride)


def _padded(spec: TensorSpec) -> int:
    return math.ceil(spec.num_bytes / _ALIGNMENT) * _ALIGNMENT
