"""The private parts of torch that this package relies on, with what each does.

Torch has no public way to any of them. A new version of torch is compared with this file first; `partition/compiled.py`
has what the compiler keeps private.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator as HigherOrderOperator  # `torch.cond` and the like
from torch._ops import OpOverload as OpOverload  # an operator of aten, as a dispatch mode is given it
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.autograd.graph import _engine_run_backward
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef  # tells when a storage has been freed
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._device import DeviceContext
from torch.utils._foreach_utils import (
    _foreach_supported_types,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten

FSDP_KEYS = (STATE_KEY, REGISTRY_KEY)
"""The attributes in which a module keeps that FSDP2 has it."""

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
push_function_mode = torch._C._push_on_torch_function_stack
pop_function_mode = torch._C._pop_torch_function_stack
function_modes = _get_current_function_mode_stack
innermost_mode_taken_off = _pop_mode_temporarily
"""A context in which the innermost function mode is not active."""

num_dispatch_modes = torch._C._len_torch_dispatch_stack
dispatch_modes_taken_off = _disable_current_modes
"""A context in which no dispatch mode is active."""


def is_faking() -> bool:
    """Whether functions run on fake tensors, as while torch exports a module."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


transform = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of `torch.func` that is running; None outside of one."""


def is_in_forward_mode() -> bool:
    """Whether a forward-mode derivative is the innermost transform."""
    running = transform()
    return running is not None and running.key() == torch._C._functorch.TransformType.Jvp


is_any_autocast_enabled = torch._C._is_any_autocast_enabled

run_backward = _engine_run_backward
"""What `torch.autograd.backward` calls once it has checked its arguments."""
next_sequence_number = torch.autograd._get_sequence_nr
"""The number of the next autograd node of this thread."""
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter
"""A context in which writes into a tensor do not count as modifications."""
unsafe_view = torch.ops.aten._unsafe_view.default
"""A view that autograd treats as a tensor of its own."""
native_batch_norm_legit = torch.ops.aten._native_batch_norm_legit

foreach_add_, foreach_copy_, foreach_norm = torch._foreach_add_, torch._foreach_copy_, torch._foreach_norm
has_foreach_support = _has_foreach_support
foreach_types = _foreach_supported_types
"""The types of tensors that torch's clipping of gradients takes as lists."""
group_by_device_and_dtype = _group_tensors_by_device_and_dtype

nested_tensor_from_mask = torch._nested_tensor_from_mask
is_nested_mask_left_aligned = torch._nested_tensor_from_mask_left_aligned
transformer_encoder_layer = torch._transformer_encoder_layer_fwd
native_multi_head_attention = torch._native_multi_head_attention
"""The fast paths of torch's transformer layers."""

below_autograd = torch._C._AutoDispatchBelowAutograd
"""While entered, functions call others as they do in inference mode."""

BackwardHookFunction = torch.nn.modules._functions.BackwardHookFunction
"""What modules with backward hooks call on their tensors."""
FunctionBase, SingleLevelFunction = torch._C._FunctionBase, torch.autograd.function._SingleLevelFunction
"""The base classes of `torch.autograd.Function`."""
PROCESS_FLAGS: Any = torch._C
"""Has the functions that set and tell flags of the process, such as which kernels attention may use."""
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""The kernel behind `scaled_dot_product_attention`, which also returns the logarithms of the softmax's denominators."""
is_inference_mode_enabled = torch.is_inference_mode_enabled
"""As torch has it, where a run gives the user's code another answer."""
ScriptFunction, ScriptMethod = torch._C.ScriptFunction, torch._C.ScriptMethod
"""What `torch.jit.script` and `torch.jit.trace` return for functions, and methods of what they return for modules."""

TAKES_MODULES = {
    "torch.jit": ("trace_module",),
    "torch.jit._trace": ("_trace_impl", "trace_module"),
    "torch.jit._script": ("_script_impl",),
    "torch.export": ("export",),
    "torch.export._trace": ("_export",),
    "torch.onnx": ("export",),
}
"""Functions that trace or export a module that they are given: those that others of torch's call, where users may have
imported those by name."""

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
def lowest_function_mode(mode: Any) -> Iterator[None]:
    """While entered, a mode is active below the user's, of which any may be entered or left meanwhile.

    Only torch's mode of a default device is below: torch enters and leaves that one at the very bottom.
    """
    with function_modes_taken_off() as modes:
        modes.insert(len(modes) - (bool(modes) and isinstance(modes[-1], DeviceContext)), mode)
    try:
        yield
    finally:
        with function_modes_taken_off() as modes:
            modes[:] = [one for one in modes if one is not mode]


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


def group_backend(group: Any, device: torch.device) -> Any:
    """The backend by which a process group sends tensors on a device."""
    return group._get_backend(device)


def default_store() -> Any:
    """The store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def default_group() -> Any:
    return torch.distributed.distributed_c10d._get_default_group()


def broadcast_coalesced(group: Any, tensors: list[Tensor], buffer_bytes: int, source: int) -> None:
    """Broadcast tensors of any dtypes from a rank of a group, several at once."""
    torch.distributed._broadcast_coalesced(group, tensors, buffer_bytes, source)


def donates_buffers() -> bool:
    """Whether compiled backwards may reuse the memory of what they saved."""
    return torch._functorch.config.donated_buffer


def keep_fake_collectives_from_drawing() -> None:
    """Have collectives on fake tensors draw their ids from a generator of their own, instead of Python's global one."""
    with suppress(ImportError):
        module: Any = importlib.import_module("torch.distributed._meta_registrations")
        module.random = random.Random()


def is_open(group: Any) -> bool:
    """Whether a process group exists and has not been destroyed."""
    distributed = torch.distributed
    return distributed.is_initialized() and group in distributed.distributed_c10d._world.pg_map


set_group_timeout = torch.distributed.distributed_c10d._set_pg_timeout
"""Bound the waits in a process group, which a DeviceMesh makes with torch's default."""


_COLLECTIVES = frozenset(("barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "all_reduce"))
"""Those that hooks call over all processes; what else they call goes to the replicas, or to single ranks."""


@contextmanager
def before_collectives(note: Callable[[str | None], None]) -> Iterator[None]:
    """While entered, call `note` before each collective, and each call of `get_rank` and the like.

    All of these ask first whether this rank is in the group.

    Args:
        note: gets the name of the collective if it is one of all processes, such as "barrier"; else None.
    """
    module: Any = torch.distributed.distributed_c10d
    plain = module._rank_not_in_group

    def noted(group: Any) -> bool:
        name = sys._getframe(1).f_code.co_name
        is_of_all = group is None or group is torch.distributed.group.WORLD
        note(name if is_of_all and name in _COLLECTIVES else None)
        return plain(group)

    module._rank_not_in_group = noted
    try:
        yield
    finally:
        module._rank_not_in_group = plain
