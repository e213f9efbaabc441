"""Operations: a torch function with the structure of its arguments.

Equal calls share an operation, whatever their tensors' data: tensors count by their specs, and numbers that only scale
data by their type. What a call gives is found out once, on fake tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_pipeline.partition.gradient_hooks import Hook
from lightning_pipeline.partition.torch_functions import function_name
from lightning_pipeline.partition.tree import without_index


class TensorSlot(NamedTuple):
    """The place of an argument's tensor number `number`."""

    number: int


class NumberSlot(NamedTuple):
    """The place of number `number` of those whose values do not count."""

    number: int
    type: type


class TakenAlong:
    """An argument that is taken along by each call, as numbers are."""

    __slots__ = ()


Template = Any
"""Nested arguments with slots in the places of tensors and numbers."""

_SHAPED_BY_NUMBERS = frozenset(
    (
        *("arange", "linspace", "logspace", "range", "interpolate", "upsample", "affine_grid", "grid_sample"),
        *("fold", "unfold"),
    )
)
"""Functions whose result's shape may depend on a float."""

_SCALED_BY_INTS = frozenset(
    (
        *("add", "sub", "mul", "div", "pow", "rsub", "true_divide", "floor_divide", "remainder", "fmod", "multiply"),
        *("add_", "sub_", "mul_", "div_", "pow_", "subtract", "divide", "maximum", "minimum", "fill_", "masked_fill"),
        *("masked_fill_", "full_like", "new_full", "clamp", "clamp_", "clamp_min", "clamp_max", "eq", "ne", "lt", "le"),
        *("gt", "ge", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rdiv__"),
        *("__rtruediv__", "__pow__", "__rpow__", "__mod__", "__rmod__", "__floordiv__", "__rfloordiv__", "__iadd__"),
        *("__isub__", "__imul__", "__itruediv__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "lerp"),
        *("lerp_", "addcmul", "addcdiv", "addcmul_", "addcdiv_"),
    )
)
"""Functions for which an int is a number like any other."""

_ATOMS = (
    *(bool, int, float, torch.Size),
    *(str, bytes, type(None), complex, range, type, type(Ellipsis), types.BuiltinFunctionType, types.FunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(slots=True)
class Call:
    """A call's arguments, taken apart.

    Attributes:
        args, kwargs: templates.
        tensors: in the order of their slots; one that occurs twice has one slot.
    """

    args: tuple[Template, ...]
    kwargs: dict[str, Template]
    tensors: list[Tensor]
    numbers: list[float]


def take_apart(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    name = function_name(function)
    call = Call((), {}, [], [])
    seen: dict[int, TensorSlot] = {}
    is_shaped = name in _SHAPED_BY_NUMBERS or getattr(function, "shaped_by_numbers", False)
    numbers: tuple[type, ...] = () if is_shaped else (float,)
    if name in _SCALED_BY_INTS:
        numbers = (float, int)

    def taken(value: Any) -> Template:
        kind = type(value)
        if isinstance(value, Tensor):
            slot = seen.get(id(value))
            if slot is None:
                slot = seen[id(value)] = TensorSlot(len(call.tensors))
                call.tensors.append(value)
            return slot
        # Nothing is no number like others: dropout of it gives its argument.
        if (kind in numbers and value) or kind is Hook or isinstance(value, TakenAlong):
            call.numbers.append(value)
            return NumberSlot(len(call.numbers) - 1, kind)
        return value

    call.args = _mapped(tuple(args), taken)
    call.kwargs = _mapped(kwargs, taken)
    return call


def put_together(template: Template, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """The arguments again, around other tensors and numbers."""

    def given(leaf: Any) -> Any:
        kind = type(leaf)
        if kind is TensorSlot:
            return tensors[leaf.number]
        return numbers[leaf.number] if kind is NumberSlot else leaf

    return _mapped(template, given)


def _mapped(template: Template, leaf: Callable[[Any], Any]) -> Any:
    """Nested arguments with other leaves."""
    kind = type(template)
    if kind is tuple or kind is list:
        return kind([_mapped(item, leaf) for item in template])
    if kind is slice:
        return slice(*(_mapped(part, leaf) for part in (template.start, template.stop, template.step)))
    if kind is dict:
        return {key: _mapped(item, leaf) for key, item in template.items()}
    return leaf(template)


def with_index_of_tensors(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """The arguments of a call that indexes, with tensors in place of NumPy's arrays, whose memory these share;
    None if there are none."""
    index = args[1] if len(args) > 1 else None
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, np.ndarray) for part in parts):
        return None
    made = tuple(torch.as_tensor(part) if isinstance(part, np.ndarray) else part for part in parts)
    return (args[0], made if isinstance(index, tuple) else made[0], *args[2:])


def tensors_in(argument: Any) -> list[Tensor]:
    """The tensors of an argument that is one, or a list of them."""
    if isinstance(argument, (tuple, list)):
        return [one for one in argument if isinstance(one, Tensor)]
    return [argument] if isinstance(argument, Tensor) else []


def is_atom(value: Any) -> bool:
    """Whether a value is no container, and does not change."""
    return isinstance(value, _ATOMS)


def key_of(template: Template) -> Hashable:
    """Equal for equal templates; what cannot be compared counts as equal to itself alone."""
    return _hashable(template, lambda leaf: (type(leaf), leaf) if is_atom(leaf) else ("object", id(leaf)))


def shown(template: Template) -> Hashable:
    """As `key_of`, but with the same text on all ranks: what has none is known by its type."""
    return _hashable(template, _shown)


def _shown(leaf: Any) -> Hashable:
    kind = type(leaf)
    if isinstance(leaf, (types.BuiltinFunctionType, types.FunctionType)):
        return kind, leaf.__qualname__
    if isinstance(leaf, (str, torch.device)):
        return kind, without_index(leaf)
    return (kind, leaf) if is_atom(leaf) else (kind.__module__, kind.__qualname__)


def _hashable(template: Template, leaf: Callable[[Any], Hashable]) -> Hashable:
    kind = type(template)
    if kind in (TensorSlot, NumberSlot):
        return template
    if kind is tuple or kind is list:
        return (kind, *(_hashable(item, leaf) for item in template))
    if kind is slice:
        return (kind, *(_hashable(part, leaf) for part in (template.start, template.stop, template.step)))
    if kind is dict:
        return (kind, *((_hashable(name, leaf), _hashable(item, leaf)) for name, item in template.items()))
    return leaf(template)
