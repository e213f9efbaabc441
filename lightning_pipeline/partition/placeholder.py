"""Placeholders: tensors with a shape and no data, in place of what another rank holds or will compute."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from multiprocessing.context import get_spawning_popen
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function
from torch.utils.data import get_worker_info

from lightning_pipeline import _torch
from lightning_pipeline.partition import users_code
from lightning_pipeline.partition.comparisons import is_never_equal
from lightning_pipeline.partition.gradient_hooks import NodeOf
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, is_of_memory, kind_of
from lightning_pipeline.partition.tree import own_device
from lightning_pipeline.partition.users_code import in_hook, users_line

skips_writes: ContextVar[bool] = ContextVar("skips_writes", default=False)
"""Whether writes into placeholders are ignored, as while a state dict is loaded."""

answers_calls: ContextVar[Callable[[Any, Any, dict[str, Any]], Any] | None] = ContextVar("answers_calls", default=None)
"""Answers calls on placeholders, given a function and its arguments, when neither a step is recorded nor a hook runs.

NotImplemented leaves the call to the placeholder.
"""


COPY = "_pl_copy"
"""The attribute of a placeholder on the first rank that was given to what it alone runs, and may keep: a copy of the
data, for when other ranks have let go of it."""


class AbsentDataError(RuntimeError):
    """The data of a placeholder was needed."""


class TensorSpec:
    """All that is known of a tensor without its data. Interned: equal specs are one object.

    Attributes:
        stride: None for sparse layouts.
        is_parameter: whether it counts as an ``nn.Parameter``.
    """

    shape: torch.Size
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    is_leaf: bool
    is_parameter: bool

    _NAMES = tuple(__annotations__)
    __slots__ = (*_NAMES, "key")

    key: tuple[Any, ...]
    _known: dict[Any, TensorSpec] = {}

    def __new__(cls, *key: Any) -> TensorSpec:
        found = cls._known.get(key)
        if found is None:
            found = cls._known[key] = super().__new__(cls)
            found.key = key
            for name, value in zip(cls._NAMES, key, strict=True):
                setattr(found, name, value)
        return found

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The spec of a tensor, which may be a fake one."""
        if type(tensor) is Placeholder:
            return tensor._pl_spec
        # A DTensor looks the same on all ranks, whether its local part is on the meta device or not.
        device = own_device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device
        return TensorSpec(
            torch.Size(tensor.shape),
            tuple(tensor.stride()) if tensor.layout is torch.strided else None,
            tensor.dtype,
            device,
            tensor.layout,
            tensor.requires_grad,
            _is_leaf(tensor),
            isinstance(tensor, nn.Parameter),
        )

    def but(self, **changes: Any) -> TensorSpec:
        """The same spec with some attributes changed."""
        return TensorSpec(*(changes.get(name, value) for name, value in zip(self._NAMES, self.key, strict=True)))

    def detached(self) -> TensorSpec:
        """The spec of the same data outside of autograd."""
        return self.but(requires_grad=False, is_leaf=True, is_parameter=False)

    def with_data_of(self, other: TensorSpec) -> TensorSpec:
        """The spec of ``x`` after ``x.data = y``, where `other` is that of ``y``."""
        return self.but(shape=other.shape, stride=other.stride, dtype=other.dtype, device=other.device)

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorSpec, self.key


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view that was made under no_grad, which tells only until something is written into it
        return True


_CONVERTING = ("to", "type", "double", "float", "half", "bfloat16", "cpu", "cuda", "npu", "xpu")
_FACTORIES = ("zeros_like", "ones_like", "empty_like", "full_like")


class Placeholder(Tensor):
    """A tensor without data.

    While a step is recorded or a hook runs, a torch function mode answers calls on it. Calls that get past the mode,
    or come at other times, are answered here if they need no data; all others raise: none is silently wrong.

    Its attributes are among the user's in one ``__dict__``: their names begin as no user's do.

    Attributes:
        _pl_value: the number of the value that it stands for in its recording.
        _pl_recording: the recording of that value; None for the module's parameters and buffers.
        _pl_what: what error messages call it; for the module's tensors, the name.
    """

    _pl_spec: TensorSpec
    _pl_value: int
    _pl_recording: Any
    _pl_what: str
    _is_param: bool  # what isinstance(..., nn.Parameter) asks for

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind is FunctionKind.DESCRIBES:
            if (told := _told_by_spec(func, args, kwargs)) is not NotImplemented:
                return told
            with _torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_never_equal(func, args):
            return NotImplemented
        if (answer := answers_calls.get()) is not None and (found := answer(func, args, kwargs)) is not NotImplemented:
            return found
        if (found := _on_copies(func, kind, args, kwargs)) is not NotImplemented:
            return found
        if kind is FunctionKind.PRINTS:
            return cls.__repr__(args[0])
        name = function_name(func)
        if args and type(args[0]) is Placeholder:
            if name in _CONVERTING:  # also of a step's values, as code after a failed step may do
                return _converted(func, *args, **kwargs)
            if args[0]._pl_recording is None:
                found = _call_on_module_tensor(name, func, args, kwargs)
                if found is not NotImplemented:
                    return found
        return _refuse(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return args[0] if _is_set_alike(func, args) else _refuse(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if _torch.num_function_modes():
            show: Any = Tensor.__repr__
            text: str = handle_torch_function(show, (self,), self, tensor_contents=tensor_contents)
            return f"Parameter containing:\n{text}" if self._pl_spec.is_parameter else text
        copied = self.__dict__.get(COPY)
        return f"Placeholder({self._pl_what}: {self._pl_spec})" if copied is None else repr(copied)

    def __copy__(self) -> Tensor:
        if self._pl_recording is None:
            if not _torch.num_function_modes():
                return placeholder(self._pl_spec, self._pl_what)
            function, args, *_ = self.__reduce_ex__(4)
            return function(*args)
        # `copy.copy` gives a new leaf of autograd with the same memory, which is told without a read.
        copied = self.detach().requires_grad_(self.requires_grad)
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name not in _OWN})
        return copied

    # Attributes that are read so often that the way through __torch_function__ would count.
    shape = property(attrgetter("_pl_spec.shape"))
    dtype = property(attrgetter("_pl_spec.dtype"))
    device = property(attrgetter("_pl_spec.device"))
    layout = property(attrgetter("_pl_spec.layout"))
    is_leaf = property(attrgetter("_pl_spec.is_leaf"))

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        is_known = self._pl_recording is not None or in_hook.on or users_code.step_runs()
        return not is_known or self._pl_spec.device.type == "meta"

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return nn.Parameter if "_is_param" in self.__dict__ else Tensor

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._pl_spec.shape)

    def dim(self) -> int:
        return len(self._pl_spec.shape)

    def size(self, dim: int | None = None) -> Any:
        return self._pl_spec.shape if dim is None else self._pl_spec.shape[dim]

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self._pl_spec.layout is torch.sparse_coo

    @property
    def is_sparse_csr(self) -> bool:  # type: ignore[override]
        return self._pl_spec.layout is torch.sparse_csr

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return NodeOf(self) if self._pl_spec.requires_grad and not self._pl_spec.is_leaf else None

    @property
    def requires_grad(self) -> bool:
        return self._pl_spec.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        handle_torch_function(Tensor.requires_grad.__set__, (self,), self, value)  # type: ignore[attr-defined]


# Code that asks for the name of a tensor's class is told the same on all ranks.
Placeholder.__name__, Placeholder.__qualname__, Placeholder.__module__ = "Tensor", "Tensor", "torch"

_OWN = ("_pl_spec", "_pl_value", "_pl_recording", "_pl_what", "_is_param")
NUM_ATTRIBUTES = 4
"""Of a placeholder that is no parameter; more if the user has set some."""


def describe(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a function by which the user's code asks for something of a tensor besides its data.

    Raises:
        NotImplementedError: it tells something of a placeholder that does not follow from the spec.
    """
    if (told := _told_by_spec(func, args, kwargs)) is not NotImplemented:
        return told
    is_unknown = args and type(args[0]) is Placeholder and is_of_memory(func)
    if is_unknown and (function_name(func) != "is_conj" or args[0].dtype.is_complex):
        refuse_memory(func, args[0])
    with _torch.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _told_by_spec(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function tells of placeholders, where it would look for their memory but the spec tells the same."""
    answer = _TOLD_BY_SPEC.get(func)
    is_asked = answer is not None and any(type(one) is Placeholder for one in (*args, *kwargs.values()))
    return answer(*args, **kwargs) if answer is not None and is_asked else NotImplemented


def _are_same_size(self: Tensor, other: Tensor) -> bool:
    return self.shape == other.shape


def _is_neg(place: Tensor) -> Any:
    """Whether its memory holds the negative, as that of ``z.conj().imag`` does, which is strided by complex numbers."""
    with _torch.DisableTorchFunctionSubclass():
        has_own = any(step == 1 and size > 1 for step, size in zip(place.stride(), place.shape, strict=True))
    return False if has_own and not place.dtype.is_complex else NotImplemented


_TOLD_BY_SPEC: dict[Any, Callable[..., Any]] = {
    Tensor.is_pinned: lambda place, device=None: False,
    Tensor.is_same_size: _are_same_size,
    torch.is_same_size: _are_same_size,
    Tensor.is_neg: _is_neg,
    Tensor.output_nr.__get__: lambda place, owner=None: 0 if place.is_leaf else NotImplemented,  # type: ignore[attr-defined]
}


def refuse_memory(func: Any, place: Placeholder) -> NoReturn:
    """Raise an error for a function that tells something of memory which this rank does not have."""
    name = function_name(func).removesuffix(".__get__")
    raise NotImplementedError(
        f"{name} tells of the memory or the graph of {place._pl_what}, which is on one stage "
        f"({users_line()}): compare what the code gives, such as `x is y`, a flag or a counter of its own, instead"
    )


_torch.foreach_types.append(Placeholder)  # clipping then calls the same functions on every rank


def placeholder(spec: TensorSpec, what: str = "a value") -> Placeholder:
    """A new placeholder, which belongs to no recording yet."""
    made: Placeholder = _torch.make_wrapper_subclass(
        Placeholder,
        spec.shape,
        strides=spec.stride,
        dtype=spec.dtype,
        device=spec.device,
        requires_grad=spec.requires_grad,
    )
    made._pl_spec, made._pl_value, made._pl_recording, made._pl_what = spec, -1, None, what
    if spec.is_parameter:
        made._is_param = True
    return made


def _converted(func: Any, place: Placeholder, *args: Any, **kwargs: Any) -> Placeholder:
    """The result of a conversion to another dtype or device, which a tensor without elements tells."""
    with _torch.DisableTorchFunctionSubclass():
        sample = func(torch.empty((), dtype=place.dtype, device=place.device), *args, **kwargs)
    spec = place._pl_spec.but(dtype=sample.dtype, device=sample.device)
    return place if spec is place._pl_spec else placeholder(spec, place._pl_what)


def _call_on_module_tensor(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a call on a parameter or buffer that another rank holds, if no data is needed; else NotImplemented."""
    place = args[0]
    spec: TensorSpec = place._pl_spec
    if name in ("grad.__get__", "_grad.__get__") or (name == "grad.__set__" and args[1] is None):
        return None
    if name in ("detach", "data.__get__"):
        return placeholder(spec.detached(), place._pl_what)
    if name in ("clone", "__deepcopy__"):
        copied = placeholder(spec, place._pl_what)
        if name == "__deepcopy__":
            args[1][id(place)] = copied
        return copied
    if name in _FACTORIES and not args[2:] and kwargs.keys() <= {"memory_format", "fill_value"}:
        return placeholder(spec.detached(), place._pl_what)
    if name == "register_hook":  # never runs here; where the data is, every rank registers the same
        with _torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name == "__reduce_ex__" and get_spawning_popen() is not None:  # for a loader's worker, which may not use it
        return placeholder, (spec, place._pl_what)
    if name == "data.__set__" and type(args[1]) is Placeholder and args[1]._pl_recording is None:
        if args[1]._pl_spec is not spec:
            become(place, placeholder(spec.with_data_of(args[1]._pl_spec), place._pl_what))
        return None
    if name == "copy_" and skips_writes.get():
        return place
    if name in ("requires_grad_", "requires_grad.__set__"):
        value = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        place._pl_spec = spec.but(requires_grad=bool(value))
        return place
    return NotImplemented


def become(place: Tensor, other: Tensor) -> None:
    """Turn the Python object `place` into the tensor `other`, so that everyone who refers to `place` sees the change.

    Nothing else may refer to `other`. Attributes that others have set on `place` stay.
    """
    _torch.swap_tensor_impl(place, other)
    if type(place) is not type(other):
        vars(object)["__class__"].__set__(place, type(other))  # past the property of placeholders
        for name in _OWN:
            place.__dict__.pop(name, None)
    if type(other) is Placeholder:
        place.__dict__.update(other.__dict__)


def become_absent(tensor: Tensor, what: str) -> None:
    """Free a leaf tensor's memory. The object stays and becomes a placeholder, or a DTensor on the meta device."""
    tensor.grad = None
    if type(tensor) not in (Tensor, nn.Parameter, nn.UninitializedParameter, DTensor, Placeholder):
        warnings.warn(
            f"{what} is a {type(tensor).__name__}, and a plain tensor on the ranks that do not hold it: mark it by an "
            f"attribute, as isinstance and methods of the class tell something else there",
            stacklevel=2,
        )
    if not isinstance(tensor, DTensor):
        become(tensor, placeholder(TensorSpec.of(tensor), what))
        return
    with torch.no_grad():
        empty = torch.empty_like(tensor, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    _torch.swap_tensor_impl(tensor, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
    tensor._local_tensor = empty._local_tensor  # type: ignore[attr-defined]


def is_absent(tensor: Tensor | None) -> bool:
    """Whether only other ranks hold this tensor of the module."""
    return type(tensor) is Placeholder or (isinstance(tensor, DTensor) and tensor._local_tensor.is_meta)


def _is_set_alike(func: Any, args: Any) -> bool:
    """Whether a placeholder is set to another's data by `set_`, as parametrizations do, and the same ranks hold both,
    for which it is to do."""
    if func is not torch.ops.aten.set_.source_Tensor or not all(type(one) is Placeholder for one in args):
        return False
    own, given = ((one._pl_spec.shape, one._pl_spec.dtype, vars(one).get("_held_by")) for one in args)
    return own == given and own[2] is not None


def _on_copies(func: Any, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
    """The result of a call that takes no placeholders but those with copies; NotImplemented for others."""
    places = [one for one in _torch.tree_leaves((args, kwargs)) if type(one) is Placeholder]
    if kind is FunctionKind.WRITES or not places or not all(COPY in one.__dict__ for one in places):
        return NotImplemented
    copies = {id(one): one.__dict__[COPY] for one in places}
    args, kwargs = _torch.tree_map_only(Tensor, lambda one: copies.get(id(one), one), (args, kwargs))
    return func(*args, **kwargs)


def _refuse(func: Any, args: Any, kwargs: Any) -> NoReturn:
    leaves = _torch.tree_leaves((args, kwargs))
    place = next((item for item in leaves if isinstance(item, Placeholder)), None)
    what = place._pl_what if place is not None else "a value"
    if any("/torch/_functorch/" in frame.filename.replace("\\", "/") for frame in traceback.extract_stack()):
        raise transform_error(what)
    way_out = (
        "do it in the LightningModule's steps and hooks or in a callback, where every rank comes to have it; where an "
        "error has ended the last run, ranks have kept their parts: make the module anew, or load a checkpoint into one"
    )
    if threading.current_thread() is not threading.main_thread():
        way_out = "a step and its hooks have to call what they call in the thread that they run in"
    elif get_worker_info() is not None:
        way_out = "a loader's worker has no connection to other ranks: DataLoader(num_workers=0) has"
    elif isinstance(func, _torch.OpOverload):
        way_out = (
            "torch's compiled code takes it there, where nothing is seen of it. Instead of nested tensors use padded "
            "ones and a mask, instead of as_subclass plain tensors, and instead of set_ a copy_ or a name"
        )
    elif users_code.step_runs():
        way_out = (
            "a class with a __torch_function__ of its own, or a subclass of torch.Tensor, keeps what is called from "
            "being seen there: use plain tensors"
        )
    name = function_name(func).replace("__reduce_ex__", "pickle")
    raise AbsentDataError(f"{name} needs the data of {what}, which this rank does not hold ({users_line()}): {way_out}")


def transform_error(what: str) -> NotImplementedError:
    """The error where ``torch.func`` transforms a function of `what`, which a stage computes or holds."""
    way_out = (
        "write it for the whole batch, or take torch.autograd.grad"
        if users_code.step_runs()
        else "write it for all rows at once, or in a loop, and take gradients in training_step, by torch.autograd.grad"
    )
    return NotImplementedError(
        f"torch.func's vmap, grad, jvp and the like cannot transform a function of what a stage has, {what} "
        f"({users_line()}): {way_out}"
    )


def higher_order_error(func: Any) -> NotImplementedError:
    """The error where one of torch's higher-order operators, such as `torch.cond`, is given what a stage has."""
    return NotImplementedError(
        f"{function_name(func)} on what a stage computes or holds is not supported, as what it calls cannot be told "
        f"from outside ({users_line()}): write it with torch.where, or plain Python"
    )
