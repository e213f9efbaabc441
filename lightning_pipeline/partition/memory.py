"""The memory of tensors: who shares it, how much it is, and how it is laid out."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition.placeholder import Placeholder


def memory_of(tensor: Tensor) -> int:
    """A number that tensors with the same memory have in common; negative for a tensor without memory of its own."""
    if type(tensor) is Placeholder or tensor.layout is not torch.strided:
        return -id(tensor)
    with _torch.DisableTorchFunction():
        try:
            return _torch.storage_id(tensor)
        except (NotImplementedError, RuntimeError):  # torch.func's own tensors
            return -id(tensor)


@cache
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from the first to the last in memory, those between included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0


def copied(tensor: Tensor) -> Tensor:
    """A copy that begins alike, with the same strides, where `clone` closes holes: kernels may sum others otherwise."""
    tensor = tensor.detach()
    begin = beginning(tensor)
    if begin and tensor.numel() and not begin % tensor.element_size():
        return _begun_at(tensor, begin)
    is_plain = tensor.layout is not torch.strided or tensor.is_contiguous() or not tensor.numel()
    return tensor.clone() if is_plain else _put_into(tensor, tensor.stride())


def laid_out(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """Give a tensor that came in dense memory the strides that it has on its stage.

    These may have holes, be zero, or let elements overlap. Sums depend on strides in their last bits.
    """
    if stride is None or tensor.stride() == stride or not tensor.numel():
        return tensor
    return _put_into(tensor.detach(), stride)


def _put_into(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same content in new memory, with these strides."""
    if _can_be_filled(tensor.shape, stride):
        made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)
    memory = torch.empty(extent(tensor.shape, stride), dtype=tensor.dtype, device=tensor.device)
    return fill(memory.as_strided(tensor.shape, stride), tensor)


ALIGNMENT = 64
"""In bytes. What torch allocates on the CPU begins at a multiple of it."""


def beginning(tensor: Tensor) -> int:
    """The bytes past a multiple of 64 at which a tensor begins in the memory of the CPU; 0 elsewhere.

    MKL's sums depend on it in their last bits, as for rows of 13 numbers of which a micro-batch has the third to fifth.
    """
    return tensor.data_ptr() % ALIGNMENT if tensor.device.type == "cpu" and tensor.layout is torch.strided else 0


def offset_of(tensor: Tensor) -> int:
    """`beginning` of a tensor in memory that begins at such a multiple itself."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return 0
    return int(tensor.storage_offset()) * tensor.element_size() % ALIGNMENT


def begun_at(tensor: Tensor, begin: int) -> Tensor:
    """A tensor, or a copy with its strides, that begins so many bytes past a multiple of 64."""
    if begin == beginning(tensor) or begin % tensor.element_size() or not tensor.numel() or not tensor.is_cpu:
        return tensor
    return _begun_at(tensor, begin)


def _begun_at(tensor: Tensor, begin: int) -> Tensor:
    """A copy that begins so many bytes past a multiple of 64."""
    size = tensor.element_size()
    memory = torch.empty(extent(tensor.shape, tensor.stride()) + ALIGNMENT // size, dtype=tensor.dtype)
    start = (begin - memory.data_ptr()) % ALIGNMENT // size
    return fill(memory.as_strided(tensor.shape, tensor.stride(), start), tensor.detach()).data


def fill(view: Tensor, tensor: Tensor) -> Tensor:
    """Copy a tensor into a view. Its data is alike where elements of the view share memory."""
    with torch.no_grad():
        if _can_be_filled(view.shape, view.stride()):
            return view.copy_(tensor)
        shape, stride, start = view.shape, view.stride(), view.storage_offset()
        memory = view.as_strided((start + extent(shape, stride),), (1,), 0)
        places = torch.arange(len(memory), device=view.device).as_strided(shape, stride, start)
        memory[places.reshape(-1)] = tensor.reshape(-1)
    return view


def _can_be_filled(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether no two elements share memory."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True


def num_storage_bytes(tensor: Tensor) -> int:
    """The size of a tensor's memory, which may be more than its elements fill."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor._nnz() * (tensor.element_size() + tensor.ndim * torch.int64.itemsize)  # values and indices


def is_view_of_kept(tensor: Tensor) -> bool:
    """Whether a tensor is a view whose base something else still refers to."""
    with _torch.DisableTorchFunction():
        base = tensor._base
        return base is not None and sys.getrefcount(base) > 2  # this local and getrefcount's argument


def views_of(tensor: Tensor) -> list[Tensor]:
    """All views of a tensor, wherever they were made."""
    with _torch.DisableTorchFunction():
        # Without views there are two references: the tensor's own, and that of the object which counts them. The search
        # through all that Python keeps, which is slow where many packages are imported, is left out then.
        if tensor.layout is torch.strided and _torch.num_storage_references(tensor) <= 2:
            return []
        return [one for one in gc.get_objects() if type(one) is Tensor and one._base is tensor]


def tensors_in_memory_of(tensors: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Further tensors in the memory of some, by `memory_of`, wherever they were made; parameters are none of them."""
    with _torch.DisableTorchFunction():
        # As in `views_of`, the search is left out where nothing else refers to any memory.
        strided = (one for one in tensors if type(one) is not Placeholder and one.layout is torch.strided)
        memories = {memory_of(one) for one in strided if _torch.num_storage_references(one) > 2}
        if not memories:
            return {}
        known = set(map(id, tensors))
        found: dict[int, list[Tensor]] = {}
        for one in [one for one in gc.get_objects() if type(one) is Tensor and id(one) not in known]:
            if (memory := memory_of(one)) in memories:
                found.setdefault(memory, []).append(one)
        return found
