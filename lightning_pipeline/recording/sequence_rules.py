"""Along which dimensions torch functions work independently, so that parts of a tensor give parts of the result.

A rule gives for each dimension of the result the tensor arguments that are cut with it, and where::

    linear(x, weight)      x: [batch, positions, width]     0: {x: 0}   1: {x: 1}   2: nothing, as it mixes the width
    x.transpose(1, 2)                                       0: {x: 0}   1: {x: 2}   2: {x: 1}

What has no rule here is computed on whole tensors, so a function is listed only if it is certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.operation import TensorSlot

Axes = dict[int, dict[int, int]]
"""For dimensions of the result: of the tensor arguments that are cut along with it, by slot, the dimension."""
Rule = Callable[[Event, torch.Size], Axes]
"""The axes of an event, given the shape of its results."""


def axes_of(event: Event) -> Axes:
    """The axes of an event; none where nothing is known, or where it writes, draws, or gives several shapes."""
    specs = [spec for spec in event.result.tensors if isinstance(spec, TensorSpec)]
    rule = _RULES.get(event.function)
    if rule is None or not specs or len(specs) < len(event.result.tensors) or event.writes or event.draws:
        return {}
    shape = specs[0].shape
    if any(len(spec.shape) != len(shape) for spec in specs) or any(spec.stride is None for spec in event.specs):
        return {}
    return rule(event, shape)


def resized(event: Event) -> Callable[..., Tensor] | None:
    """What gives a part of an event's result, called with the operand's part and the shape, if its arguments tell that
    of the whole; else None."""
    return _SIZED.get(event.function)


def argument(event: Event, place: int, name: str, default: Any = None) -> Any:
    if len(event.call.args) > place:
        return event.call.args[place]
    return event.call.kwargs.get(name, default)


def _found(names: Iterable[str], *holders: Any) -> list[Any]:
    return [getattr(holder, name) for name in names for holder in holders or _HOLDERS if hasattr(holder, name)]


_HOLDERS = (torch, Tensor, F)


def _slots(event: Event) -> list[tuple[int, torch.Size]]:
    return [(slot, spec.shape) for slot, spec in enumerate(event.specs)]


def _dims(value: Any, rank: int) -> list[int] | None:
    """Dimensions as an argument gives them, counted from zero; None if they are not numbers."""
    given = value if isinstance(value, (tuple, list)) else [value]
    if not given or any(type(one) is not int for one in given):
        return None
    return [one % rank for one in given]


# -- element by element -------------------------------------------------------------------------------------------


def _elementwise(event: Event, shape: torch.Size) -> Axes:
    """Broadcast to a common shape."""
    if len(event.result.tensors) > 1 or torch.broadcast_shapes(*(each for _, each in _slots(event))) != shape:
        return {}
    found: Axes = {}
    for dim in range(len(shape)):
        inside = {slot: dim - len(shape) + len(each) for slot, each in _slots(event)}
        found[dim] = {slot: own for slot, own in inside.items() if own >= 0 and event.specs[slot].shape[own] != 1}
    return found


def _first(event: Event, shape: torch.Size) -> Axes:
    """Conversions, of which only the first argument counts."""
    is_alike = event.call.args and event.call.args[0] == TensorSlot(0) and event.specs[0].shape == shape
    return {dim: {0: dim} for dim in range(len(shape))} if is_alike else {}


# -- along other dimensions ---------------------------------------------------------------------------------------


def _rows(event: Event, shape: torch.Size) -> Axes:
    """All dimensions but the last, as of `linear`."""
    slot = argument(event, 0, "input")
    if not isinstance(slot, TensorSlot) or len(event.specs[slot.number].shape) != len(shape):
        return {}
    return {dim: {slot.number: dim} for dim in range(len(shape) - 1)}


def _normalized(event: Event, shape: torch.Size) -> Axes:
    normalized = argument(event, 1, "normalized_shape", ())
    count = len(normalized) if isinstance(normalized, (tuple, list)) else 1
    return {dim: slots for dim, slots in _rows(event, shape).items() if dim < len(shape) - count}


def _embedding(event: Event, shape: torch.Size) -> Axes:
    slot, is_scaled = argument(event, 0, "input"), argument(event, 5, "scale_grad_by_freq", False)
    if is_scaled or not isinstance(slot, TensorSlot):
        return {}
    return {dim: {slot.number: dim} for dim in range(len(shape) - 1)}


def _along(place: int, default: Any = None) -> Rule:
    """All dimensions but those that an argument gives."""

    def rule(event: Event, shape: torch.Size) -> Axes:
        own = event.specs[0].shape
        mixed = _dims(argument(event, place, "dim", default), len(own)) if own else None
        if mixed is None or event.call.args[:1] != (TensorSlot(0),):
            return {}
        kept = [dim for dim in range(len(own)) if dim not in mixed]
        if len(shape) == len(own):
            return {dim: {0: dim} for dim in kept if shape[dim] == own[dim]}
        return {place: {0: dim} for place, dim in enumerate(kept)} if len(shape) == len(kept) else {}

    return rule


def _matmul(event: Event, shape: torch.Size) -> Axes:
    first, second = argument(event, 0, "input"), argument(event, 1, "other")
    if not (isinstance(first, TensorSlot) and isinstance(second, TensorSlot)) or first == second:
        return {}
    sizes = {slot.number: event.specs[slot.number].shape for slot in (first, second)}
    if len(shape) < 2 or min(map(len, sizes.values())) < 2:
        return {}
    found: Axes = {}
    for dim in range(len(shape) - 2):
        inside = {slot: dim - len(shape) + len(each) for slot, each in sizes.items()}
        found[dim] = {slot: own for slot, own in inside.items() if own >= 0 and sizes[slot][own] != 1}
    found[len(shape) - 2] = {first.number: len(sizes[first.number]) - 2}
    found[len(shape) - 1] = {second.number: len(sizes[second.number]) - 1}
    return found


def _cat(event: Event, shape: torch.Size) -> Axes:
    given, dim = argument(event, 0, "tensors", ()), argument(event, 1, "dim", 0)
    if type(dim) is not int or not isinstance(given, (tuple, list)):
        return {}
    # Of one dimension and no elements are what caches begin with.
    full = [slot for slot in dict.fromkeys(given) if event.specs[slot.number].shape != (0,)]
    if any(len(event.specs[slot.number].shape) != len(shape) for slot in full):
        return {}
    is_one = len(full) == 1 and given.count(full[0]) == 1
    kept = [one for one in range(len(shape)) if one != dim % len(shape) or is_one]
    return {one: {slot.number: one for slot in full} for one in kept}


def _stack(event: Event, shape: torch.Size) -> Axes:
    given, dim = argument(event, 0, "tensors", ()), argument(event, 1, "dim", 0)
    if type(dim) is not int or not isinstance(given, (tuple, list)):
        return {}
    kept = [one for one in range(len(shape)) if one != dim % len(shape)]
    return {one: {slot.number: own for slot in dict.fromkeys(given)} for own, one in enumerate(kept)}


# -- the same elements, seen otherwise ----------------------------------------------------------------------------


def _reshaped(event: Event, shape: torch.Size) -> Axes:
    """Dimensions that stay as they are between those that are merged and split."""
    own, made = event.specs[0].shape, event.result.tensors[0]
    if isinstance(made, int) or made.dtype is not event.specs[0].dtype:  # a view of the bytes
        return {}
    if event.call.args[:1] != (TensorSlot(0),) or len(event.specs) > 1 or not own.numel() == shape.numel() > 0:
        return {}
    places = {(math.prod(own[:dim]), size): dim for dim, size in enumerate(own) if size > 1}
    keys = {dim: (math.prod(shape[:dim]), size) for dim, size in enumerate(shape)}
    return {dim: {0: places[key]} for dim, key in keys.items() if key in places}


def _expanded(event: Event, shape: torch.Size) -> Axes:
    own = event.specs[0].shape
    found: Axes = {}
    for dim in range(len(shape)):
        inside = dim - len(shape) + len(own)
        if inside >= 0 and own[inside] == shape[dim] > 1:
            found[dim] = {0: inside}
    return found if event.call.args[:1] == (TensorSlot(0),) and len(event.specs) == 1 else {}


def _permuted(order: Callable[[Event, int], Sequence[int] | None]) -> Rule:
    def rule(event: Event, shape: torch.Size) -> Axes:
        dims = order(event, len(shape))
        if dims is None or event.call.args[:1] != (TensorSlot(0),):
            return {}
        return {dim: {0: own} for dim, own in enumerate(dims)}

    return rule


def _transposed(event: Event, rank: int) -> Sequence[int] | None:
    pair = _dims([argument(event, 1, "dim0"), argument(event, 2, "dim1")], rank)
    return None if pair is None else _swapped(rank, *pair)


def _swapped(rank: int, first: int, second: int) -> list[int]:
    order = list(range(rank))
    order[first], order[second] = second, first
    return order


def _in_order(event: Event, rank: int) -> Sequence[int] | None:
    rest = event.call.args[1:] or (event.call.kwargs.get("dims"),)
    return _dims(rest[0] if isinstance(rest[0], (tuple, list)) else rest, rank)


def _indexed(event: Event, shape: torch.Size) -> Axes:
    """Slices, numbers, None and Ellipsis; dimensions that are taken whole can be cut."""
    own = event.specs[0].shape
    index = event.call.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if len(event.specs) > 1 or not all(
        one is None or one is Ellipsis or type(one) is int or _is_plain_slice(one) for one in items
    ):
        return {}
    count = sum(one is not None and one is not Ellipsis for one in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    place = items.index(Ellipsis)
    items[place : place + 1] = [slice(None)] * (len(own) - count)
    found: Axes = {}
    dim = inside = 0
    for item in items:
        if isinstance(item, slice):
            if item.indices(own[inside]) == (0, own[inside], 1):
                found[dim] = {0: inside}
            dim, inside = dim + 1, inside + 1
        elif item is None:
            dim += 1
        else:
            inside += 1
    return found


def _is_plain_slice(item: Any) -> bool:
    return isinstance(item, slice) and all(
        one is None or type(one) is int for one in (item.start, item.stop, item.step)
    )


_ELEMENTWISE = (
    *("neg", "abs", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf", "square"),
    *("relu", "relu6", "gelu", "silu", "mish", "softplus", "elu", "selu", "leaky_relu", "hardswish", "hardtanh"),
    *("hardsigmoid", "logsigmoid", "pow", "reciprocal", "sign", "clamp", "clamp_min", "clamp_max", "nan_to_num"),
    "clip",
    *("round", "floor", "ceil", "isnan", "isfinite", "isinf", "logical_not", "bitwise_not", "positive", "add", "sub"),
    *("mul", "div", "true_divide", "maximum", "minimum", "where", "eq", "ne", "lt", "le", "gt", "ge", "logical_and"),
    *("logical_or", "logical_xor", "bitwise_and", "bitwise_or", "masked_fill", "addcmul", "addcdiv", "lerp", "rsub"),
    *("remainder", "fmod", "floor_divide", "atan2", "multiply", "subtract", "divide", "__add__", "__radd__", "__sub__"),
    *("__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__rdiv__", "__pow__", "__rpow__", "__neg__"),
    *("__and__", "__or__", "__xor__", "__invert__", "__mod__", "__floordiv__", "__eq__", "__ne__", "__lt__", "__le__"),
    *("__gt__", "__ge__", "__abs__"),
)
_CONVERTING = (
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "contiguous", "clone"),
    *("detach", "cpu", "cuda", "alias"),
)

_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_found(_ELEMENTWISE), _elementwise),
    **dict.fromkeys(_found(_CONVERTING, torch, Tensor), _first),
    F.linear: _rows,
    **dict.fromkeys((F.layer_norm, F.rms_norm, torch.rms_norm), _normalized),
    F.embedding: _embedding,
    **dict.fromkeys(_found(("softmax", "log_softmax")), _along(1)),
    **dict.fromkeys(_found(("mean", "sum", "amax", "amin", "logsumexp", "all", "any", "argmax", "argmin")), _along(1)),
    **dict.fromkeys(_found(("var", "std", "cumsum", "cumprod")), _along(1)),
    **dict.fromkeys(_found(("norm",), Tensor), _along(2)),
    F.normalize: _along(2, 1),
    F.glu: _along(1, -1),
    **dict.fromkeys(_found(("matmul", "bmm", "mm", "__matmul__")), _matmul),
    **dict.fromkeys(_found(("chunk", "split", "tensor_split"), torch, Tensor), _along(2, 0)),
    **dict.fromkeys(_found(("unbind",)), _along(1, 0)),
    **dict.fromkeys(_found(("cat", "concat", "concatenate")), _cat),
    torch.stack: _stack,
    **dict.fromkeys(_found(("transpose", "swapaxes", "swapdims")), _permuted(_transposed)),
    **dict.fromkeys(_found(("permute",)), _permuted(_in_order)),
    Tensor.mT.__get__: _permuted(lambda event, rank: _swapped(rank, rank - 2, rank - 1)),  # type: ignore[attr-defined]
    Tensor.__getitem__: _indexed,
}
_RESHAPING = _found(
    ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"), torch, Tensor
)
_EXPANDING = _found(("expand", "broadcast_to"), torch, Tensor)
_RULES |= {**dict.fromkeys(_RESHAPING, _reshaped), **dict.fromkeys(_EXPANDING, _expanded)}
_SIZED: dict[Any, Any] = {**dict.fromkeys(_RESHAPING, Tensor.reshape), **dict.fromkeys(_EXPANDING, Tensor.expand)}
