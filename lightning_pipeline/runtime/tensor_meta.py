"""Tensors that travel from one stage to another: how they look, and which go to all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pipeline.runtime.backend_rules import is_dense

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
    return shape, torch.empty(shape, device="meta").stride()
