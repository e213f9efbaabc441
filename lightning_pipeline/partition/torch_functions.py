"""Classifies torch functions for recording: those that read data, draw random numbers, or write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline import _torch


class FunctionKind(Enum):
    """What a function does."""

    COMPUTES = auto()  # tensors from tensors, and nothing else
    DESCRIBES = auto()  # tells something of a tensor that does not depend on its data
    READS = auto()  # returns Python values that depend on the data
    DRAWS = auto()  # random numbers, from torch's default generators or one of the user's
    WRITES = auto()  # into its first argument, or into `out`
    ENTERED = auto()  # calls other functions, which are seen one by one
    GRAD_MODE = auto()  # turns autograd on or off
    PRINTS = auto()  # a tensor as text
    HOOKS = auto()  # registers a hook
    BACKWARD = auto()  # runs autograd
    CALLS = auto()  # a function of the user's for each element of its first argument, which it overwrites


_GETTERS = (
    *("shape", "dtype", "device", "layout", "names", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad_dtype"),
    *("output_nr", "retains_grad", "name", "nbytes", "itemsize", "is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta"),
    *("is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan"),
    *("is_xla", "is_xpu", "_version", "_base", "_cdata", "_grad_fn", "_backward_hooks", "_python_dispatch"),
    *("_post_accumulate_grad_hooks", "_has_symbolic_sizes_strides", "volatile"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "__len__"),
    *("is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "is_same_size", "is_inference"),
    *("is_pinned", "dim_order", "__hash__", "is_shared", "is_coalesced", "has_names", "is_conj", "is_neg", "_is_view"),
)
_FUNCTIONS = (
    *("is_floating_point", "is_complex", "numel", "is_inference", "get_device", "is_same_size", "is_signed"),
    *("result_type", "can_cast", "_has_compatible_shallow_copy_type"),
)
_OF_MEMORY = frozenset(
    (
        *("storage_offset", "_is_view", "_base.__get__", "_version.__get__", "output_nr.__get__", "is_conj", "is_neg"),
        *("data_ptr", "untyped_storage", "storage", "_typed_storage", "is_set_to"),
    )
)
_READING = (
    *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"),
    *("__contains__", "__nonzero__", "__long__", "data_ptr", "untyped_storage", "storage", "_typed_storage"),
    *("__reduce_ex__", "__dlpack__", "share_memory_", "is_set_to", "equal", "allclose", "is_nonzero"),
)
_DRAWING = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    *("native_dropout", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal"),
    *("bernoulli", "multinomial", "poisson", "binomial", "rrelu", "gumbel_softmax", "scaled_dot_product_attention"),
    *("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu", "fractional_max_pool2d"),
    *("fractional_max_pool3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("dropout_", "feature_dropout_", "alpha_dropout_", "feature_alpha_dropout_", "rrelu_", "bernoulli_", "uniform_"),
    *("normal_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "kaiming_uniform_"),
    *("_standard_gamma", "_sample_dirichlet", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "sparse_"),
    *("kaiming_normal_", "orthogonal_", "_fused_dropout", "svd_lowrank", "pca_lowrank", "lobpcg"),
)
"""Names of what aten tags as nondeterministic_seeded, and of functions that call it."""

_HOOKING = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")

_KINDS: dict[Any, FunctionKind] = {
    _torch.set_grad_enabled: FunctionKind.GRAD_MODE,
    torch.autograd.grad: FunctionKind.BACKWARD,
    torch.autograd.backward: FunctionKind.BACKWARD,
}


def _note(kind: FunctionKind, owners: Iterable[Any], names: Iterable[str]) -> None:
    for owner in owners:
        for name in names:
            found = getattr(owner, name, None)
            if found is not None:
                _KINDS.setdefault(found, kind)


_note(FunctionKind.DESCRIBES, (Tensor,), _METHODS)
_note(FunctionKind.DESCRIBES, (torch,), _FUNCTIONS)
_note(FunctionKind.READS, (Tensor, torch), _READING)
_note(FunctionKind.PRINTS, (Tensor,), ("__repr__", "__str__", "__format__"))
_note(FunctionKind.HOOKS, (Tensor,), _HOOKING)
_note(FunctionKind.CALLS, (Tensor,), ("apply_", "map_", "map2_"))
_note(FunctionKind.BACKWARD, (Tensor,), ("backward",))
_note(FunctionKind.DRAWS, (Tensor, torch, F, *_torch.VARIABLE_FUNCTIONS, torch.nn.init), _DRAWING)
for _name in _GETTERS:
    if hasattr(Tensor, _name):
        _KINDS[getattr(Tensor, _name).__get__] = FunctionKind.DESCRIBES
_profiler = torch.ops.profiler
for _recorded in (_profiler._record_function_enter_new, _profiler._record_function_exit):  # record_function
    _KINDS[_recorded] = FunctionKind.DESCRIBES
    for _overload in _recorded.overloads():
        _KINDS[getattr(_recorded, _overload)] = FunctionKind.DESCRIBES


_LAID_OUT_BY_OTHERS = frozenset(
    (
        *("__getitem__", "masked_select", "repeat_interleave", "view", "reshape", "expand", "as_strided", "narrow"),
        *("split", "split_with_sizes", "tensor_split", "chunk", "repeat", "tile", "unflatten", "roll", "pad"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "index_select", "__setitem__", "index_put", "index_put_"),
    )
)


def is_laid_out_by_others(function: Any) -> bool:
    """Whether the spec of a function's result may depend on the data of its later arguments, and not of its first."""
    return function_name(function) in _LAID_OUT_BY_OTHERS


def kind_of(function: Any) -> FunctionKind:
    """What a torch function does, given the function that a mode sees."""
    kind = _KINDS.get(function)
    if kind is None:
        kind = _KINDS[function] = _kind_by_name(function_name(function))
    return kind


_FILES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))


def is_torchs(value: Any) -> bool:
    """Whether a function or another object is torch's or this package's, and not one that the user has put there."""
    code = getattr(value, "__code__", None)
    if code is None:
        return type(value).__module__.partition(".")[0] in ("builtins", "typing", "torch", __name__.partition(".")[0])
    return code.co_filename.startswith(_FILES)


def is_quantizing(function: Any) -> bool:
    """Whether a function makes quantized tensors, or packs them."""
    operator = getattr(function, "_qualified_op_name", "") or getattr(function, "_name", "")
    return function_name(function).startswith("quantize_per_") or str(operator).startswith("quantized::")


def is_drawing(name: str) -> bool:
    """Whether a function of torch of this name draws random numbers."""
    return name in _DRAWING


def is_of_memory(function: Any) -> bool:
    """Whether a function tells something of a tensor's memory, of which each rank has its own, or of its graph."""
    return function_name(function) in _OF_MEMORY


def same_kind(function: Any, other: Any) -> None:
    """Take note that a function, which calls another one, does what that does."""
    _KINDS[function] = kind_of(other)


def drawn_into(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function that draws random numbers writes them into; None if it makes a tensor of them."""
    if not function_name(func).endswith("_"):
        return None
    return args[0] if args else (kwargs or {}).get("tensor")


def is_drawing_of_own(kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers from a generator of the user's."""
    return kwargs.get("generator") is not None


# torch_npu's Tensor.__repr__, and what it asks first. Not known yet if torch_npu is imported later.
_OF_NPU = {"_npu_internal_format_repr": FunctionKind.PRINTS, "get_npu_format": FunctionKind.DESCRIBES}


def _kind_by_name(name: str) -> FunctionKind:
    if name in _OF_NPU:
        return _OF_NPU[name]
    if name.endswith(".__set__") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return FunctionKind.WRITES
    if name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__"):
        return FunctionKind.WRITES
    return FunctionKind.COMPUTES


def written_by(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors whose data an operator of aten writes into; a write into one in a list does not raise its version."""
    schema = operation._schema
    if not schema.is_mutable or torch.Tag.inplace_view in operation.tags:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            several = given if isinstance(given, (list, tuple)) else [given]
            yield from (one for one in several if isinstance(one, Tensor))


def function_name(function: Any) -> str:
    """The name of a torch function; "grad.__get__" for the getter of a property."""
    name = getattr(function, "__name__", "") or type(function).__name__
    if name in ("__get__", "__set__", "__delete__"):
        return f"{getattr(getattr(function, '__self__', None), '__name__', '?')}.{name}"
    return str(name)
