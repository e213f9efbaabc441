"""How a tensor looks that travels from one stage to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pipeline.runtime.backend_rules import is_dense


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
