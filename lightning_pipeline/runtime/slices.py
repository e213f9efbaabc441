"""Outside of steps, calls on parameters of which replicas have slices: they run on the whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.partition.placeholder import Placeholder, is_absent
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.runtime.fully_sharded import local_part, slice_like, whole

_IS_VIEW = "_of_slices"
"""The attribute of a view of what was gathered for a call."""


def on_whole_tensors(
    run: Callable[[Any, Any, Any], Any], func: Any, args: Any, kwargs: dict[str, Any], name: str
) -> Any:
    """Run a call on whole tensors in the places of slices, and write into these what it writes into those.

    All replicas must call it.

    Raises:
        NotImplementedError: slices are of ranks of one stage, by tensor parallelism.
    """
    gathered: dict[int, tuple[DTensor, Tensor, int]] = {}

    def gather(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if is_absent(tensor):
            raise NotImplementedError(
                f"{name} is given a parameter that tensor parallelism has split, outside of steps ({users_line()}): "
                f"leave such parameters out, or leave them whole"
            )
        if id(tensor) not in gathered:
            found = whole(tensor)
            note_holders(found, holders_of(tensor))
            gathered[id(tensor)] = tensor, found.requires_grad_(tensor.requires_grad), found._version
        return gathered[id(tensor)][1]

    with torch._C.DisableTorchFunction():
        given = tree.replace((args, kwargs), gather)
    result = run(func, *given)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        slices = {id(found): part for part, found, _ in gathered.values()}
        memories = {found.untyped_storage().data_ptr() for _, found, _ in gathered.values()}
        for part, found, version in gathered.values():
            if found._version > version:
                local_part(part).copy_(local_part(slice_like(part, found)))
        for made in tree.leaves(result):
            if type(made) is Placeholder or id(made) in slices or made.layout is not torch.strided:
                continue
            if made.untyped_storage().data_ptr() in memories:
                made.__dict__[_IS_VIEW] = True
        return tree.replace(result, lambda made: slices.get(id(made), made))


def refuse_writing(tensor: Tensor, name: str) -> None:
    """Raise where a write would be lost.

    Raises:
        NotImplementedError: the tensor is a view of what was gathered for a call before.
    """
    if _IS_VIEW in tensor.__dict__:
        raise NotImplementedError(
            f'{name} writes into a view, such as .data, of a parameter that data_parallel="fsdp" keeps in slices '
            f"({users_line()}): write into the parameter itself under torch.no_grad(), or use opt_shard=True"
        )
