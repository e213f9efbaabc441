"""Tensors of a module that are different objects on the same memory, as ``a.weight.data = b.weight.data`` makes them.

On one device a write into one of them is seen in the other. Stages hold memory of their own, so such tensors have to be
on the same stages. What is tied as one object (``a.weight = b.weight``) may be on any.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import extent, memory_of
from lightning_pipeline.partition.ownership import Ownership, is_held_otherwise, named_tensors
from lightning_pipeline.partition.placeholder import Placeholder


def tensors_that_share_memory(module: nn.Module) -> list[list[str]]:
    """Names of parameters and buffers on the same memory, one name for each object; not of separate parts of it, as
    `torch.nn.utils.vector_to_parameters` makes them.
    """
    found: dict[int, dict[int, tuple[range, str]]] = {}
    for name, tensor in named_tensors(module):
        if type(tensor) is not Placeholder and not tensor.is_meta and tensor.numel():
            found.setdefault(memory_of(tensor), {}).setdefault(id(tensor), (_bytes_of(tensor), name))
    groups: list[list[str]] = []
    for sharing in found.values():
        end = -1
        for part, name in sorted(sharing.values(), key=lambda one: one[0].start):
            if part.start >= end:
                groups.append([])
            groups[-1].append(name)
            end = max(end, part.stop)
    return [names for names in groups if len(names) > 1]


def _bytes_of(tensor: Tensor) -> range:
    """Where in its memory a tensor is, from its first to its last byte."""
    if tensor.layout is not torch.strided:
        return range(1)
    with _torch.DisableTorchFunction():
        start, stride = tensor.storage_offset(), tensor.stride()
    size = tensor.element_size()
    return range(start * size, (start + extent(tensor.shape, stride)) * size)


def refuse_apart(groups: Sequence[Sequence[str]], ownership: Ownership) -> None:
    """Check that stages hold all tensors of the same memory, or none of them."""
    for first, *others in groups:
        for other in others:
            if first in ownership and other in ownership and ownership.holders[first] != ownership.holders[other]:
                raise ValueError(
                    f"{other} shares its memory with {first}, which another stage holds, and neither would see what is "
                    f"written into the other: tie the tensors as one object, as in `a.weight = b.weight` instead of "
                    f"`a.weight.data = b.weight.data`, put both on one stage, or clone() one of them"
                )


def warn_of_aliases(module: nn.Module, ownership: Ownership) -> None:
    """Before tensors are released: warn of attributes on their memory, which would keep the values of now."""
    released = {
        memory_of(tensor): name for name, tensor in named_tensors(module) if is_held_otherwise(name, tensor, ownership)
    }
    own = {id(tensor) for _, tensor in named_tensors(module)}
    for prefix, sub in module.named_modules() if released else ():
        if sub._forward_pre_hooks:  # which make attributes anew, as those of torch.nn.utils.spectral_norm do
            continue
        for attribute, value in vars(sub).items():
            for tensor in _tensors_in(value):
                name = released.get(memory_of(tensor)) if id(tensor) not in own else None
                if name is not None:
                    warnings.warn(
                        f"{prefix}{'.' if prefix else ''}{attribute} shares its memory with {name}, which another "
                        f"stage holds, and keeps the values of now: keep the parameter or buffer itself, or a clone()",
                        stacklevel=2,
                    )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors that an attribute refers to, directly or in a list or dictionary; not those of modules."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    yield from (item for item in items if isinstance(item, Tensor) and type(item) is not Placeholder)
