"""The private parts of torch that this package relies on, with what each does.

Torch has no public way to any of them. A new version of torch is compared with this file first; `partition/compiled.py`
has what the compiler keeps private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload as OpOverload  # an operator of aten, as a dispatch mode is given it
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

DisableTorchFunction = torch._C.DisableTorchFunction
"""While entered, neither modes nor the `__torch_function__` of subclasses are called."""
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""While entered, modes are called and the `__torch_function__` of subclasses is not."""

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
"""The base class of all batch norms."""

set_grad_enabled = torch._C._set_grad_enabled
"""What `torch.set_grad_enabled` and the like call; modes are given it."""

VARIABLE_FUNCTIONS = (torch._C._VariableFunctions, torch._VF)
"""Where torch's own Python code finds functions that are in `torch.` as well."""

num_function_modes = torch._C._len_torch_function_stack

make_wrapper_subclass = Tensor._make_wrapper_subclass
"""A tensor of a subclass, with a shape and no memory."""

swap_tensor_impl = torch._C._swap_tensor_impl
"""Exchange what two Python objects refer to. Unlike `torch.utils.swap_tensors` it leaves class and attributes alone."""


@contextmanager
def function_modes_taken_off() -> Iterator[list[Any]]:
    """While entered, no torch function mode is active. Gives those that were, the innermost first."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(num_function_modes())]
    try:
        yield modes
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def function_modes_put_on(modes: list[Any]) -> Iterator[None]:
    """While entered, these modes are active as well, the last one as the innermost."""
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in modes:
            torch._C._pop_torch_function_stack()


def storage_id(tensor: Tensor) -> int:
    """A number that tensors with one storage have in common, even if the storage has no data."""
    return tensor.untyped_storage()._cdata


def num_storage_references(tensor: Tensor) -> int:
    """How many C++ objects share a tensor's storage: its tensors, and the Python object that this call makes."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


is_profiling = torch.autograd._profiler_enabled
"""Whether a profiler is on."""
record_functions = torch.autograd._enable_record_function
"""Whether a profiler that is on notes what this thread calls."""


def group_backend(group: Any, device: torch.device) -> Any:
    """The backend by which a process group sends tensors on a device."""
    return group._get_backend(device)


def default_store() -> Any:
    """The store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_open(group: Any) -> bool:
    """Whether a process group exists and has not been destroyed."""
    distributed = torch.distributed
    return distributed.is_initialized() and group in distributed.distributed_c10d._world.pg_map


set_group_timeout = torch.distributed.distributed_c10d._set_pg_timeout
"""Bound the waits in a process group, which a DeviceMesh makes with torch's default."""


@contextmanager
def before_collectives(note: Callable[[], None]) -> Iterator[None]:
    """While entered, call `note` before each collective, and each call of `get_rank` and the like.

    All of these ask first whether this rank is in the group.
    """
    module: Any = torch.distributed.distributed_c10d
    plain = module._rank_not_in_group

    def noted(group: Any) -> bool:
        note()
        return plain(group)

    module._rank_not_in_group = noted
    try:
        yield
    finally:
        module._rank_not_in_group = plain
