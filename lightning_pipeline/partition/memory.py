"""Which tensors share memory."""

from __future__ import annotations

import gc
import sys
from functools import cache

import torch
from torch import Tensor

from lightning_pipeline.partition.placeholder import Placeholder


def memory_of(tensor: Tensor) -> int:
    """A number that tensors with the same memory have in common; below zero for a tensor without memory of its own."""
    if type(tensor) is Placeholder or tensor.layout is not torch.strided:
        return -id(tensor)
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # torch.func's own tensors
            return -id(tensor)


@cache
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def bytes_of(tensor: Tensor) -> int:
    """The size of a tensor's memory, which may be more than its elements fill."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor._nnz() * (tensor.element_size() + tensor.ndim * torch.int64.itemsize)  # values and their places


def is_view_of_kept(tensor: Tensor) -> bool:
    """Whether a tensor is a view, and somebody still refers to its base."""
    with torch._C.DisableTorchFunction():
        base = tensor._base
        return base is not None and sys.getrefcount(base) > 2


def views_of(tensor: Tensor) -> list[Tensor]:
    """All views of a tensor, wherever they were made."""
    with torch._C.DisableTorchFunction():
        return [one for one in gc.get_objects() if type(one) is Tensor and one._base is tensor]
