"""Infers an operation's result on fake tensors: specs, shared memory, writes."""

from __future__ import annotations

import math
import types
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.memory import contiguous_strides, offset_of
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.partition.torch_functions import function_name, written_by
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.recording.graph_walk import edges_before
from lightning_pipeline.recording.operation import Call, TensorSlot, put_together

UNKNOWN = (
    _torch.DataDependentOutputException,
    _torch.DynamicOutputShapeException,
    _torch.UnsupportedFakeTensorException,
    _torch.UnsupportedOperatorException,
)


class CallError(NotImplementedError):
    """A call that cannot be part of a step."""


@dataclass(frozen=True, slots=True)
class Result:
    """What an operation gives.

    Attributes:
        layout: of the result; its slots number `tensors`.
        tensors: for each, its spec, or the number of the argument that it is.
        shares: for each new tensor, the arguments whose memory it shares.
        writes: the arguments that are written into, each with its spec afterwards.
        draws: how often random numbers are drawn in it, where it is made of other functions.
        repeats: the arguments to which gradients go back several times, as to the weights of a recurrent layer, each
            with how often.
        unreached: pairs of a result and an argument to which no gradient goes back from it, though both have gradients.
        begins: for each new tensor, how many bytes after the memory that it shares, or is new, past a multiple of 64.
    """

    layout: Layout
    tensors: tuple[TensorSpec | int, ...]
    shares: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, TensorSpec], ...]
    draws: int = 0
    repeats: tuple[tuple[int, int], ...] = ()
    unreached: tuple[tuple[int, int], ...] = ()
    begins: tuple[int, ...] = ()


NOTHING = Result(tree.Constant(None), (), (), ())


_CONTIGUOUS_ON_CPU = frozenset(
    (
        torch.ops.aten.native_batch_norm.default,
        _torch.native_batch_norm_legit.default,
        _torch.native_batch_norm_legit.no_stats,
        torch.ops.aten.log_sigmoid_forward.default,
        torch.ops.aten.log_sigmoid.default,
    )
)
"""Their kernels for the CPU lay results out anew, where their fake implementations keep the strides of the input."""


class _FakeTensorMode(_torch.FakeTensorMode):
    """Knows the strides that results have on the CPU: what crosses a stage's boundary with others is summed in another
    order there, and gradients end in other bits than on one stage.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.written: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.written += written_by(func, args, kwargs or {})
        found: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.native_group_norm.default and (kept := _channels_last_of(args[0])) is not None:
            return found[0].contiguous(memory_format=kept), *found[1:]  # contiguous since torch 2.14
        if func not in _CONTIGUOUS_ON_CPU or args[0].device.type != "cpu":
            return found
        if isinstance(found, Tensor):
            return found.contiguous()
        is_norm = "batch_norm" in func.name()
        return found if is_norm and _channels_last_of(args[0]) is not None else (found[0].contiguous(), *found[1:])


def _channels_last_of(tensor: Tensor) -> torch.memory_format | None:
    """The format in which its channels are last; None if they are not."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    format = formats.get(tensor.dim())
    return format if format is not None and tensor.is_contiguous(memory_format=format) else None


_SMALL, _LARGE = 1 << 18, 1 << 26
"""Bytes of a call's tensors up to which its strides are found on real ones; the latter of `_LAID_OUT_OTHERWISE`."""

_BUILT_IN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    types.MethodWrapperType,
)

_LAID_OUT_OTHERWISE = frozenset(
    (
        *("roll", "one_hot", "max_pool1d", "max_pool1d_with_indices", "max_unpool1d", "max_unpool2d", "max_unpool3d"),
        *("pad", "channel_shuffle", "native_channel_shuffle", "rrelu", "rrelu_", "nll_loss", "cross_entropy", "normal"),
        *("copysign", "floor_divide", "__floordiv__", "__rfloordiv__", "div", "divide", "ldexp", "logaddexp"),
        *("logaddexp2", "logical_and", "logical_or", "logical_xor", "heaviside", "xlogy", "xlog1py"),
    )
)
"""Functions whose results have other strides on the CPU than fake ones, by name."""


_CAST_WITHIN = ("layer_below", "layer_on_nested", "attention")
"""The fast paths of torch's transformer layers, within whose kernels autocast casts, but not on fake tensors."""

_TOLD_BY_ZEROS = frozenset(
    (
        *("linear", "matmul", "__matmul__", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "batch_norm", "layer_norm"),
        *("group_norm", "relu", "gelu", "silu", "leaky_relu", "elu", "tanh", "sigmoid", "softplus", "log_sigmoid"),
        *("softmax", "log_softmax", "mse_loss", "l1_loss", "smooth_l1_loss", "cross_entropy", "nll_loss", "exp", "log"),
        *("sqrt", "rsqrt", "square", "pow", "__pow__", "sin", "cos", "abs", "neg", "__neg__", "clamp", "sign"),
        *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__"),
        *("div", "__truediv__", "__rtruediv__", "__rdiv__", "sum", "mean", "amax", "amin", "norm"),
        *("view", "reshape", "flatten", "transpose", "permute", "unsqueeze", "squeeze", "expand", "contiguous"),
        *("T.__get__", "mT.__get__", "t", "chunk", "split", "unbind", "cat", "stack", "clone", "detach", "__getitem__"),
        *("float", "double", "half", "bfloat16", "add_", "sub_", "mul_", "div_", "copy_", "zero_", "fill_", "relu_"),
        *("embedding", "dropout", "scaled_dot_product_attention"),
    )
)
"""Functions of torch's whose results' specs follow from those of the arguments, by name: on zeros they tell them in a
tenth of the time of fake tensors, and exactly. Of `__getitem__`, those whose index has no tensors."""
_FEW = 1 << 26
"""Elements that two arguments may come to together, as by broadcasting, where their call is run on zeros at once."""


_RESIZING = ("fused_moving_avg_obs_fake_quant",)
"""Functions that give tensors which they write into other shapes, of which their fake implementations know nothing."""


class _NotingWrites(_torch.TorchDispatchMode):
    """Notes what is written into, of real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.written += written_by(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Inference:
    """Runs functions on fake tensors of one process. Autograd, autocast and the default dtype are as they are now."""

    def __init__(self) -> None:
        _torch.keep_fake_collectives_from_drawing()
        self.mode = _FakeTensorMode()

    def result(self, function: Any, call: Call, specs: Sequence[TensorSpec]) -> Result | None:
        """What `function` gives; None where only the data tells, or torch does not know."""
        if function_name(function) in _RESIZING:
            return self._on_zeros(function, call, specs)
        if any(spec.stride is None for spec in specs):
            found = self._on_zeros(function, call, specs)
            # Two elements at one place, as of a sparse gradient, which `coalesce` does not give back as it is.
            return found if found == self._on_zeros(function, call, specs, num_stored=2) else None
        if function_name(function) in _CAST_WITHIN and _torch.is_any_autocast_enabled():
            return self._without_draws(function, call, specs, as_ever=True)
        if _is_told_by_zeros(function, specs) and (told := self._without_draws(function, call, specs)) is not None:
            return told
        fakes = self.fakes(specs)
        try:
            with self.mode:
                found = _run(function, call, fakes, specs, self.mode)
            return self._laid_out(found, function, call, specs)
        except CallError:
            raise
        except UNKNOWN:
            return None
        except Exception as error:
            if "data is not allocated" in str(error):  # it looks into the data, as into the sizes of packed sequences
                return None
            return self._on_zeros(function, call, specs)

    def fakes(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Tensors without data, on which torch's functions run at once."""
        with self.mode:
            return [_made(spec) for spec in specs]

    def _on_zeros(
        self, function: Any, call: Call, specs: Sequence[TensorSpec], num_stored: int = 0, *, as_ever: bool = False
    ) -> Result | None:
        """What `function` gives where its fake implementation is stricter than the real one, or where there is none, as
        for sparse tensors; None where data matters.

        Torch's own functions say so where the specs of their results depend on data, and this one has not.

        Args:
            num_stored: elements that sparse tensors store, on which some results depend.
            as_ever: without looking for writes to tensors in lists, as poolings go other ways while somebody looks on.
        """
        try:
            with torch.no_grad():
                zeros = [_made(spec, 0) if spec.stride is not None else _sparse(spec, num_stored) for spec in specs]
            with nullcontext(_NotingWrites()) if as_ever else _NotingWrites() as noted:
                return _run(function, call, zeros, specs, noted)
        except Exception:
            return None

    def _without_draws(
        self, function: Any, call: Call, specs: Sequence[TensorSpec], *, as_ever: bool = False
    ) -> Result | None:
        """As `_on_zeros`, with the global generator as it was."""
        before = torch.default_generator.get_state()
        try:
            return self._on_zeros(function, call, specs, as_ever=as_ever)
        finally:
            torch.default_generator.set_state(before)

    def _laid_out(self, found: Result, function: Any, call: Call, specs: Sequence[TensorSpec]) -> Result:
        """What a function gives, with the strides that it has on the CPU: fake implementations come to others where
        operands are permuted differently, along dimensions of one element, and where kernels have ways of their own.
        Strides do not depend on data, so zeros show them, where they take no time."""
        made = [spec for spec in found.tensors if isinstance(spec, TensorSpec)]
        if not any(len(spec.shape) > 1 for spec in made) or not _is_of_torch(function):
            return found
        if any(spec.device.type != "cpu" or spec.stride is None for spec in (*specs, *made)):
            return found
        is_known = function_name(function) in _LAID_OUT_OTHERWISE
        if not is_known and all(spec.stride == contiguous_strides(spec.shape) for spec in (*specs, *made)):
            return found
        limit = _LARGE if is_known else _SMALL
        if sum(spec.num_bytes for spec in (*specs, *made)) > limit:
            return found
        real = self._without_draws(function, call, specs, as_ever=True)
        if real is None or _without_strides(real) != _without_strides(found):
            return found
        return replace(found, tensors=real.tensors, shares=real.shares)

    def fake(self, spec: TensorSpec) -> Tensor:
        with self.mode:
            return _made(spec)

    def result_on_data(self, function: Any, call: Call, data: Sequence[Tensor], specs: Sequence[TensorSpec]) -> Result:
        """What `function` gives on this data, which is not changed. `specs` are those that it has in the step."""
        with torch.no_grad():
            tensors = [_made(spec, tensor) for spec, tensor in zip(specs, data, strict=True)]
        with _NotingWrites() as noted:
            return _run(function, call, tensors, specs, noted)


def _made(spec: TensorSpec, content: Tensor | float | None = None) -> Tensor:
    stride = spec.stride

    def made_anew() -> Tensor:
        if stride is None:
            assert isinstance(content, Tensor)
            return content.detach().clone()
        if content is None:
            return torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device=spec.device)
        repeated = [step == 0 and size > 1 for size, step in zip(spec.shape, stride, strict=True)]
        shape = [1 if one else size for one, size in zip(repeated, spec.shape, strict=True)]
        made = torch.empty_strided(shape, stride, dtype=spec.dtype, device=spec.device)
        memory = made.untyped_storage()
        if memory.nbytes() > made.nbytes:  # kernels may read between the elements, as that of ctc_loss takes classes
            memory.fill_(0)  # type: ignore[attr-defined]
        if isinstance(content, Tensor):
            places = tuple(slice(0, 1) if one else slice(None) for one in repeated)
            made.copy_(content.detach()[places])
        else:
            made.fill_(content)
        return made.expand(spec.shape) if any(repeated) else made

    with torch.inference_mode(False):
        if spec.is_parameter:
            return nn.Parameter(made_anew(), requires_grad=spec.requires_grad)
        made = made_anew()
        if not spec.requires_grad:
            return made
        made.requires_grad_()
        if spec.is_leaf:
            return made
        with torch.enable_grad():  # a tensor of the graph, that may be written into
            if stride is None:
                return made.clone()
            if content is not None:
                seen = _torch.unsafe_view(made, spec.shape)
                if seen.stride() == stride or 0 in stride:
                    return seen  # and not with other strides along dimensions of one element
            return made_anew().copy_(made)


def _is_told_by_zeros(function: Any, specs: Sequence[TensorSpec]) -> bool:
    """Whether to run a call on zeros, which are few."""
    name = function_name(function)
    if name not in _TOLD_BY_ZEROS or not _is_of_torch(function) or (name == "__getitem__" and len(specs) > 1):
        return False
    largest = sorted(math.prod(spec.shape) for spec in specs)[-2:]
    is_small = sum(spec.num_bytes for spec in specs) <= _SMALL and math.prod(largest) <= _FEW
    return is_small and all(spec.device.type == "cpu" for spec in specs)


def _is_of_torch(function: Any) -> bool:
    """Whether it is one of torch's own functions, which does nothing but compute."""
    if isinstance(function, types.FunctionType):
        return function.__module__.startswith("torch.")
    if isinstance(function, (_torch.OpOverload, _torch.OpOverloadPacket)):
        return function.__module__ == "torch._ops.aten"
    return isinstance(function, _BUILT_IN)


def _without_strides(result: Result) -> Any:
    return result.layout, [one.but(stride=None) if isinstance(one, TensorSpec) else one for one in result.tensors]


def _sparse(spec: TensorSpec, num_stored: int) -> Tensor:
    made = torch.sparse_coo_tensor(
        torch.zeros(len(spec.shape), num_stored, dtype=torch.int64),
        torch.zeros(num_stored, dtype=spec.dtype),
        spec.shape,
        device=spec.device,
    )
    return _made(spec, made if spec.layout is torch.sparse_coo else made.to_sparse(layout=spec.layout))


def _run(
    function: Any,
    call: Call,
    tensors: Sequence[Tensor],
    specs: Sequence[TensorSpec],
    noted: _FakeTensorMode | _NotingWrites,
) -> Result:
    """What `function` gives on these tensors, which it may write into, as is `noted`."""
    noted.written.clear()
    storages = [_storage(tensor) for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    # Scripted functions compute other bits after their first calls, among which this one must not count.
    with torch.jit.optimized_execution(False):
        found = function(
            *put_together(call.args, tensors, call.numbers), **put_together(call.kwargs, tensors, call.numbers)
        )
    ids = set(map(id, noted.written))
    written = {number for number, tensor in enumerate(tensors) if id(tensor) in ids}
    if hasattr(function, "applies"):  # which may write by `.data`, of which autograd does not hear
        memories = set(map(_storage, noted.written))
        written |= {number for number, memory in enumerate(storages) if memory is not None and memory in memories}
    noted.written.clear()
    return _result(found, tensors, storages, versions, specs, written | writes_beside(function, call))


def _result(
    found: Any,
    arguments: Sequence[Tensor],
    storages: Sequence[int | None],
    versions: Sequence[int],
    specs: Sequence[TensorSpec],
    written: Set[int],
) -> Result:
    made, layout = tree.flatten(found)
    numbers = {id(argument): number for number, argument in enumerate(arguments)}
    tensors: list[TensorSpec | int] = []
    shares: list[tuple[int, ...]] = []
    for tensor in made:
        number = numbers.get(id(tensor))
        tensors.append(TensorSpec.of(tensor) if number is None else number)
        own = _storage(tensor)
        shares.append(() if own is None else tuple(i for i, other in enumerate(storages) if other == own))
    writes = tuple(
        (number, TensorSpec.of(argument))
        for number, (argument, version, spec) in enumerate(zip(arguments, versions, specs, strict=True))
        if argument._version != version or TensorSpec.of(argument) != spec or number in written
    )
    begins = tuple(0 if id(one) in numbers else offset_of(one) for one in made)
    ends: dict[int, GradientEdge] = {}
    if any(tensor.requires_grad for tensor in made):
        givers = [(number, one) for number, one in enumerate(arguments) if one.requires_grad and not one.is_inference()]
        ends = {number: get_gradient_edge(one) for number, one in givers}
    return Result(
        layout,
        tuple(tensors),
        tuple(shares),
        writes,
        repeats=tuple((number, count) for number, count in _counts(made, ends).items() if count > 1),
        unreached=_unreached(made, {number: edge for number, edge in ends.items() if number not in dict(writes)}),
        begins=begins,
    )


def _counts(made: Sequence[Tensor], ends: Mapping[int, GradientEdge]) -> dict[int, int]:
    """How many edges of a call's graph lead to each of its arguments."""
    counts = Counter((edge.node, edge.output_nr) for _, _, edge in edges_before(made, ends.values()))
    return {number: counts[edge.node, edge.output_nr] for number, edge in ends.items()}


def _unreached(made: Sequence[Tensor], ends: Mapping[int, GradientEdge]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (place, number)
        for place, tensor in enumerate(made)
        if tensor.requires_grad
        for number, count in _counts([tensor], ends).items()
        if not count
    )


def written_by_array(tensor: Tensor, content: Tensor) -> None:
    """What numpy does to a tensor whose memory it shares: autograd does not hear of it."""
    tensor.data.copy_(content)


def writes_beside(function: Any, call: Call) -> frozenset[int]:
    """Arguments that a function writes into without a word to autograd: a batch norm's running statistics, and what
    `.data` is set of."""
    if function_name(function) == "data.__set__" or function is written_by_array:
        return frozenset([call.args[0].number])
    if function_name(function) not in ("batch_norm", "instance_norm"):
        return frozenset()
    names: tuple[str, ...] = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    if function in (torch.batch_norm, torch.instance_norm):
        names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn")
    if function is torch.nn.functional.instance_norm:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    is_training = given.get("training", given.get("use_input_stats", False))
    statistics = (given.get("running_mean"), given.get("running_var"))
    return frozenset(slot.number for slot in statistics if is_training and isinstance(slot, TensorSlot))


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
