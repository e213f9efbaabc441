"""Which tensors share memory."""

from __future__ import annotations

import gc
import sys

import torch
from torch import Tensor

from lightning_pipeline.partition.placeholder import Placeholder


def memory_of(tensor: Tensor) -> int:
    """Tells tensors that share memory from those that do not."""
    if type(tensor) is Placeholder or tensor.layout is not torch.strided:
        return -id(tensor)
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # torch.func's own tensors
            return -id(tensor)


def is_view_of_kept(tensor: Tensor) -> bool:
    """Whether somebody refers to the tensor of which this is a view."""
    with torch._C.DisableTorchFunction():
        base = tensor._base
        return base is not None and sys.getrefcount(base) > 2


def views_of(tensor: Tensor) -> list[Tensor]:
    """What shares a tensor's memory as a view of it, wherever it was made."""
    with torch._C.DisableTorchFunction():
        return [one for one in gc.get_objects() if type(one) is Tensor and one._base is tensor]
