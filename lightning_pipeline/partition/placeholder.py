"""Placeholders, which stand in for tensors whose data is elsewhere or not there yet; and shared memory."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function
from torch.utils.data import get_worker_info

from lightning_pipeline.partition.gradient_hooks import NodeOf
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, kind_of
from lightning_pipeline.partition.users_line import users_line

skips_writes: ContextVar[bool] = ContextVar("skips_writes", default=False)
"""Whether writes of what a rank does not hold are skipped, as where a state dict is loaded."""


_CONVERTING = ("to", "type", "double", "float", "half", "bfloat16", "cpu", "cuda", "npu", "xpu")
_FACTORIES = ("zeros_like", "ones_like", "empty_like", "full_like")


class _InHook:
    """Whether code of the user's runs between steps, to which all tensors look as in one process.

    Attributes:
        is_rank_known: the code has asked which rank runs it, so that it may do something else on each.
        when_rank_known: is called when it has asked.
        thread: that in which it runs; others, such as one that writes a checkpoint, go their own ways on each rank.
    """

    on = False
    is_rank_known = False
    when_rank_known: Callable[[], None] | None = None
    thread = 0

    def note_rank(self) -> None:
        """The rank is asked for."""
        if self.is_here() and not self.is_rank_known:
            self.is_rank_known = True
            if self.when_rank_known is not None:
                self.when_rank_known()

    def is_here(self) -> bool:
        """Whether it runs in this thread."""
        return self.on and self.thread == threading.get_ident()


in_hook = _InHook()


class _Absent:
    """What answers calls on tensors that are elsewhere, when neither a step is recorded nor a hook runs.

    Attributes:
        answer: given the function, its arguments and keywords; NotImplemented leaves the call to the placeholder.
    """

    answer: Callable[[Any, Any, dict[str, Any]], Any] | None = None


absent = _Absent()


class AbsentDataError(RuntimeError):
    """The data of a tensor was needed where there is none."""


class TensorSpec:
    """What can be known of a tensor without its data. Interned: equal spec are one object.

    Attributes:
        shape, stride, dtype, device, layout, requires_grad: the tensor's; the stride is None for sparse layouts.
        is_leaf: whether it is one of autograd's leaves.
        is_parameter: whether it counts as an ``nn.Parameter``.
    """

    __slots__ = ("device", "dtype", "is_leaf", "is_parameter", "key", "layout", "requires_grad", "shape", "stride")

    key: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    is_leaf: bool
    is_parameter: bool

    _known: dict[Any, TensorSpec] = {}

    def __new__(cls, *key: Any) -> TensorSpec:
        found = cls._known.get(key)
        if found is None:
            found = cls._known[key] = super().__new__(cls)
            found.key = key
            found.shape, found.stride, found.dtype, found.device, found.layout = key[:5]
            found.requires_grad, found.is_leaf, found.is_parameter = key[5:]
        return found

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """That of a tensor, be it a fake one."""
        if type(tensor) is Placeholder:
            return tensor.spec
        # All ranks see a split tensor alike, be it on the meta device or not.
        device = torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device
        return TensorSpec(
            torch.Size(tensor.shape),
            tuple(tensor.stride()) if tensor.layout is torch.strided else None,
            tensor.dtype,
            device,
            tensor.layout,
            tensor.requires_grad,
            tensor.is_leaf,
            isinstance(tensor, nn.Parameter),
        )

    def but(self, **changes: Any) -> TensorSpec:
        """The same but for some attributes."""
        names = ("shape", "stride", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_parameter")
        return TensorSpec(*(changes.get(name, value) for name, value in zip(names, self.key, strict=True)))

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorSpec, self.key


class Placeholder(Tensor):
    """A tensor without data.

    While a step is recorded, a mode answers torch's functions for it. Whatever gets past the mode, or comes when
    nothing is recorded, says so: no operation on it is silent.

    Attributes:
        spec: what is known of it.
        value: the number of the value that it stands for, in its recording.
        recording: whose value it is; None for a module's tensors.
        what: how errors call it; of a module's tensors, the name.
    """

    spec: TensorSpec
    value: int
    recording: Any
    what: str
    _is_param: bool  # what isinstance(..., nn.Parameter) asks for

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = kind_of(func)
        if kind is FunctionKind.DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if absent.answer is not None:
            answer = absent.answer(func, args, kwargs or {})
            if answer is not NotImplemented:
                return answer
        if kind is FunctionKind.PRINTS:
            return cls.__repr__(args[0])
        # Also after a step that failed.
        if function_name(func) in _CONVERTING and args and type(args[0]) is Placeholder:
            with torch._C.DisableTorchFunctionSubclass():
                one = torch.empty((), dtype=args[0].dtype, device=args[0].device)
                one = func(one, *args[1:], **(kwargs or {}))
            spec = args[0].spec.but(dtype=one.dtype, device=one.device)
            return args[0] if spec is args[0].spec else placeholder(spec, args[0].what)
        if args and type(args[0]) is Placeholder and args[0].recording is None:
            name = function_name(func)
            if name in ("grad.__get__", "_grad.__get__"):
                return None
            if name == "grad.__set__" and args[1] is None:
                return None
            if name in ("detach", "data.__get__", "__deepcopy__", "clone"):
                spec = args[0].spec
                is_copy = name in ("__deepcopy__", "clone")
                made = placeholder(spec if is_copy else spec.but(requires_grad=False, is_leaf=True, is_parameter=False))
                made.what = args[0].what
                if name == "__deepcopy__":
                    args[1][id(args[0])] = made
                return made
            if name in _FACTORIES and not args[2:] and (kwargs or {}).keys() <= {"memory_format", "fill_value"}:
                spec = args[0].spec.but(requires_grad=False, is_leaf=True, is_parameter=False)
                return placeholder(spec, args[0].what)
            if name == "register_hook":  # runs where the data is, and with it on every rank
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            if name == "__reduce_ex__":
                return placeholder, (args[0].spec, args[0].what)
            if name == "data.__set__" and type(args[1]) is Placeholder and args[1].recording is None:
                spec = args[1].spec
                if spec is not args[0].spec:
                    changes = {name: getattr(spec, name) for name in ("shape", "stride", "dtype", "device")}
                    become(args[0], placeholder(args[0].spec.but(**changes), args[0].what))
                return None
            if name == "copy_" and skips_writes.get():
                return args[0]
            if name in ("requires_grad_", "requires_grad.__set__"):
                value = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
                args[0].spec = args[0].spec.but(requires_grad=bool(value))
                return args[0]
        return _refuse(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _refuse(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if torch._C._len_torch_function_stack():
            show: Any = Tensor.__repr__
            text: str = handle_torch_function(show, (self,), self, tensor_contents=tensor_contents)
            return f"Parameter containing:\n{text}" if self.spec.is_parameter else text
        return f"Placeholder({self.what}: {self.spec})"

    # Asked for so often that torch's way to them would count.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.spec.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.spec.device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return self.recording is None and not in_hook.on

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.spec.shape)

    def dim(self) -> int:
        return len(self.spec.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.spec.shape if dim is None else self.spec.shape[dim]

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return self.spec.layout

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self.spec.layout is torch.sparse_coo

    @property
    def is_sparse_csr(self) -> bool:  # type: ignore[override]
        return self.spec.layout is torch.sparse_csr

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self.spec.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return NodeOf(self) if self.spec.requires_grad and not self.spec.is_leaf else None

    @property
    def requires_grad(self) -> bool:
        return self.spec.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        handle_torch_function(Tensor.requires_grad_, (self,), self, value)


_wrap = Tensor._make_wrapper_subclass


def placeholder(spec: TensorSpec, what: str = "a value") -> Placeholder:
    """A new one, of no recording yet."""
    made: Placeholder = _wrap(
        Placeholder,
        spec.shape,
        strides=spec.stride,
        dtype=spec.dtype,
        device=spec.device,
        requires_grad=spec.requires_grad,
    )
    made.spec, made.value, made.recording, made.what = spec, -1, None, what
    if spec.is_parameter:
        made._is_param = True
    return made


def become(place: Tensor, other: Tensor) -> None:
    """Turn the Python object `place` into the tensor `other`, which must have no other owner: whoever holds it sees the
    change. Attributes that others have set on it stay."""
    torch._C._swap_tensor_impl(place, other)
    if type(place) is not type(other):
        place.__class__ = type(other)
        for name in ("spec", "value", "recording", "what"):
            place.__dict__.pop(name, None)
    if type(other) is Placeholder:
        place.__dict__.update(other.__dict__)


def become_absent(tensor: Tensor, what: str) -> None:
    """Free a leaf tensor's memory. The object stays, and is a placeholder; a split one is on the meta device."""
    tensor.grad = None
    if not isinstance(tensor, DTensor):
        become(tensor, placeholder(TensorSpec.of(tensor), what))
        return
    with torch.no_grad():
        empty = torch.empty_like(tensor, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    torch._C._swap_tensor_impl(tensor, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
    tensor._local_tensor = empty._local_tensor  # type: ignore[attr-defined]


def is_absent(tensor: Tensor) -> bool:
    """Whether this rank does not hold a tensor of the module."""
    return type(tensor) is Placeholder or (isinstance(tensor, DTensor) and tensor._local_tensor.is_meta)


def _refuse(func: Any, args: Any, kwargs: Any) -> NoReturn:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    place = next((item for item in leaves if isinstance(item, Placeholder)), None)
    what = place.what if place is not None else "a value"
    if any("/torch/_functorch/" in frame.filename.replace("\\", "/") for frame in traceback.extract_stack()):
        raise NotImplementedError(
            f"torch.func's vmap, grad, jvp and the like cannot transform a function of what a stage computes, {what}, "
            f"within a step ({users_line()}): write it for the whole batch, or take torch.autograd.grad"
        )
    way_out = "do it in the LightningModule's steps and hooks or in a callback, where every rank comes to have it"
    if threading.current_thread() is not threading.main_thread():
        way_out = "a step and its hooks have to call what they call in the thread that they run in"
    elif get_worker_info() is not None:
        way_out = "a loader's worker has no connection to other ranks: DataLoader(num_workers=0) has"
    elif isinstance(func, torch._ops.OpOverload):
        way_out = "torch's compiled code takes it there; where that makes nested tensors, use padded ones and a mask"
    raise AbsentDataError(
        f"{function_name(func)} needs the data of {what}, which this rank does not hold ({users_line()}): {way_out}"
    )


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


_OWN_REFERENCES = 2
"""To the memory of a tensor without views: its own, and that of the object which counts them."""


def views_of(tensor: Tensor) -> list[Tensor]:
    """All views of a tensor, wherever they were made."""
    with torch._C.DisableTorchFunction():
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) <= _OWN_REFERENCES:
                return []  # and no look at all that Python keeps, which takes a while with many packages
        return [one for one in gc.get_objects() if type(one) is Tensor and one._base is tensor]
