"""Which torch functions read a tensor's metadata only, and which depend on its data in a way that shapes can follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_GETTERS = (
    *("shape", "dtype", "device", "layout", "names", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad_dtype"),
    *("output_nr", "retains_grad", "name", "nbytes", "itemsize", "is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta"),
    *("is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan"),
    *("is_xla", "is_xpu", "_version", "_base", "_cdata", "_grad_fn", "_backward_hooks", "_python_dispatch"),
    *("_post_accumulate_grad_hooks", "_has_symbolic_sizes_strides"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "__len__"),
    *("is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "is_same_size", "is_inference"),
    *("is_pinned", "dim_order", "__hash__"),
)
_FUNCTIONS = ("is_floating_point", "is_complex", "numel", "is_inference", "get_device", "result_type", "can_cast")

_profiler = torch.ops.profiler
_RECORDED = (  # torch.profiler.record_function, which profilers and models use
    *(_profiler._record_function_enter_new, _profiler._record_function_enter_new.default),
    *(getattr(_profiler._record_function_exit, overload) for overload in _profiler._record_function_exit.overloads()),
    _profiler._record_function_exit,
)

METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in _GETTERS if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)]
    + [getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)]
    + [torch._C._set_grad_enabled, *_RECORDED]
)
"""Functions that an absent tensor answers by itself, or that take none; they are no events."""

PRINTED = frozenset({"__repr__", "__str__", "__format__"})
"""Functions that turn a tensor to text; no events either, so that a print shows an absent tensor as absent."""

DATA_DEPENDENT = frozenset(
    ["nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "repeat_interleave"]
)
"""Functions whose result's shape depends on data."""

HOOKING = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
"""Functions whose result nobody needs on another stage."""
