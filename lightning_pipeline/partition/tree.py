"""Flattens nested values into their tensors, and rebuilds them around others.

`flatten` turns any value into its tensors and a *layout*, a description that can be pickled, and hashed if its
constants can; `rebuild` makes an equal value around other tensors. Torch's pytree knows lists, tuples, dicts and
classes that are registered with it. Batches and results of steps also hold dataclasses, Hugging Face's `ModelOutput`
and `BatchEncoding`, objects with tensors in their attributes, and others that can be pickled, such as torch_geometric's
`Data`; and the layout of a batch has to tell how to split it.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import io
import pickle
import re
import types
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_NAME = re.compile(r"(cuda|npu|xpu|hpu|mtia|mps|musa|mlu|privateuseone):\d+")


def without_index(device: torch.device | str) -> str:
    """A device, or the name of one, without its index, which differs between ranks. Other strings stay as they are."""
    if isinstance(device, torch.device):
        return device.type
    return device.partition(":")[0] if _NAME.fullmatch(device) else device


def dumps(obj: Any) -> bytes:
    """Pickle an object for other ranks, where this rank's device becomes theirs."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = REDUCTIONS
    pickler.dump(obj)
    return file.getvalue()


def own_device(kind: str) -> torch.device:
    """This process's device of a kind, with its index, as tensors have it."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _reduce(device: torch.device) -> Any:
    if device.index is None or device.type in ("cpu", "meta"):
        return device.__reduce__()
    return own_device, (device.type,)


REDUCTIONS: ChainMap[Any, Any] = ChainMap({torch.device: _reduce}, copyreg.dispatch_table)
"""The dispatch table of pickles for other ranks."""


class Slot(NamedTuple):
    """The place of a tensor, by its number in the flat list."""

    number: int


class Constant(NamedTuple):
    """A value without tensors."""

    value: Any


class Sequence(NamedTuple):
    """A list, tuple or named tuple."""

    type: type
    items: tuple[Any, ...]


class Dictionary(NamedTuple):
    """A mapping. `attributes` are what its class keeps beside the items."""

    type: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]
    attributes: tuple[tuple[str, Any], ...]


class Object(NamedTuple):
    """An object whose attributes, named by `keys`, hold tensors."""

    type: type
    keys: tuple[str, ...]
    items: tuple[Any, ...]


class Pickled(NamedTuple):
    """An object that is kept as a pickle, without its tensors."""

    name: str
    content: bytes
    items: tuple[Slot, ...]


Layout = Slot | Constant | Sequence | Dictionary | Object | Pickled

_ATOMS = (
    *(int, float, bool, str, bytes, complex, type(None), range, slice, type, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, torch.UntypedStorage, torch.TypedStorage),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial),
)
_MAX_DEPTH = 16
_SETS = (set, frozenset, deque)
_SLOTS = tuple(Slot(number) for number in range(64))  # made once, as values rarely hold more tensors


def flatten(value: Any) -> tuple[list[Tensor], Layout]:
    """The tensors of a nested value, and its layout. A tensor that occurs twice is listed once."""
    tensors: list[Tensor] = []
    return tensors, _flatten(value, tensors, {}, 0)


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in the order of `flatten`."""
    if type(value) is Tensor:
        return [value]
    return flatten(value)[0]


def rebuild(layout: Layout, tensors: list[Any] | tuple[Any, ...]) -> Any:
    """The value that `layout` describes, around `tensors`."""
    kind = type(layout)
    if kind is Slot:
        return tensors[layout.number]  # type: ignore[union-attr]
    if kind is Constant:
        return layout.value  # type: ignore[union-attr]
    if isinstance(layout, Sequence):
        items = [tensors[item.number] if type(item) is Slot else rebuild(item, tensors) for item in layout.items]
        if layout.type is list:
            return items
        return layout.type(*items) if hasattr(layout.type, "_fields") else layout.type(items)
    if isinstance(layout, Dictionary):
        return _rebuild_dictionary(layout, tensors)
    if isinstance(layout, Pickled):
        return _WithTensors(layout, tensors).load()
    assert isinstance(layout, Object)
    made: Any = object.__new__(layout.type)
    for name, item in zip(layout.keys, layout.items, strict=True):
        object.__setattr__(made, name, rebuild(item, tensors))
    return made


def replace(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """An equal value with `function` applied to each of its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    tensors, layout = flatten(value)
    return rebuild(layout, [function(tensor) for tensor in tensors]) if tensors else value


def _flatten(value: Any, tensors: list[Tensor], seen: dict[int, Slot], depth: int) -> Layout:
    if isinstance(value, Tensor):
        return _slot(value, tensors, seen)
    if isinstance(value, (_ATOMS, nn.Module)) or depth > _MAX_DEPTH:
        return Constant(value)
    if isinstance(value, (list, tuple)):
        items = _flatten_all(value, tensors, seen, depth + 1)
        if type(value) in (list, tuple) or hasattr(value, "_fields") or _holds_slot(items):
            return Sequence(type(value), items)
        return Constant(value)
    if isinstance(value, Mapping):
        keys = tuple(value.keys())
        items = _flatten_all([value[key] for key in keys], tensors, seen, depth + 1)
        return Dictionary(type(value), keys, items, _mapping_attributes(value))
    if _needs_pickle(value) and (pickled := _pickled(value, tensors, seen)) is not None:
        return pickled
    own = attributes(value)
    if not own:
        return Constant(value)
    items = _flatten_all(own.values(), tensors, seen, depth + 1)
    if dataclasses.is_dataclass(value) or _holds_slot(items):
        return Object(type(value), tuple(own), items)
    return Constant(value)


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of a value; None if its class has none that can be listed."""
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):  # one with slots
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return getattr(value, "__dict__", None)


def _needs_pickle(value: Any) -> bool:
    """Whether an object is more than its attributes, so that only its class knows how to take it apart.

    torch_geometric's objects hold weak references to one another, and have classes that are made at run time; others
    keep tensors in slots, or in a container that is written in C.
    """
    cls = type(value)
    if cls in _SETS:
        return any(isinstance(item, Tensor) for item in value)
    if dataclasses.is_dataclass(cls) or cls.__module__ == "numpy":
        return False
    return (
        callable(value)
        or cls.__reduce_ex__ is not object.__reduce_ex__
        or cls.__reduce__ is not object.__reduce__
        or hasattr(cls, "__setstate__")
        or (hasattr(cls, "__slots__") and not hasattr(value, "__dict__"))
    )


class _TensorsApart(pickle.Pickler):
    """Pickles an object with slots in place of its tensors."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor], seen: dict[int, Slot]) -> None:
        super().__init__(file)
        self.dispatch_table = REDUCTIONS
        self._tensors, self._seen = tensors, seen
        self.slots: dict[int, Slot] = {}

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, nn.Module):
            raise pickle.PicklingError("a module is no container of tensors")
        if not isinstance(value, Tensor):
            return None
        slot = _slot(value, self._tensors, self._seen)
        self.slots[slot.number] = slot
        return slot.number


class _WithTensors(pickle.Unpickler):
    def __init__(self, layout: Pickled, tensors: list[Any] | tuple[Any, ...]) -> None:
        super().__init__(io.BytesIO(layout.content))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]


def _pickled(value: Any, tensors: list[Tensor], seen: dict[int, Slot]) -> Layout | None:
    file, before = io.BytesIO(), len(tensors)
    pickler = _TensorsApart(file, tensors, seen)
    try:
        pickler.dump(value)
    except Exception:  # the user's classes may raise anything: it cannot be pickled
        for tensor in tensors[before:]:
            del seen[id(tensor)]
        del tensors[before:]
        return None
    if not pickler.slots:
        return Constant(value)
    return Pickled(type(value).__qualname__, file.getvalue(), tuple(pickler.slots.values()))


def _flatten_all(values: Iterable[Any], tensors: list[Tensor], seen: dict[int, Slot], depth: int) -> tuple[Layout, ...]:
    items: list[Layout] = []
    for value in values:
        if type(value) is Tensor:
            items.append(_slot(value, tensors, seen))
        else:
            items.append(_flatten(value, tensors, seen, depth))
    return tuple(items)


def _slot(tensor: Tensor, tensors: list[Tensor], seen: dict[int, Slot]) -> Slot:
    slot = seen.get(id(tensor))
    if slot is None:
        number = len(tensors)
        slot = seen[id(tensor)] = _SLOTS[number] if number < len(_SLOTS) else Slot(number)
        tensors.append(tensor)
    return slot


def _holds_slot(items: tuple[Layout, ...]) -> bool:
    for item in items:
        if isinstance(item, Slot):
            return True
        if not isinstance(item, Constant) and _holds_slot(item.items):
            return True
    return False


def _mapping_attributes(value: Mapping[Any, Any]) -> tuple[tuple[str, Any], ...]:
    """Plain values that a mapping keeps in attributes, beside its items, as `BatchEncoding` does."""
    if type(value) is dict:
        return ()
    kept = getattr(value, "__dict__", {})
    return tuple((name, item) for name, item in kept.items() if name not in value and isinstance(item, _ATOMS))


def _rebuild_dictionary(layout: Dictionary, tensors: list[Any] | tuple[Any, ...]) -> Any:
    items = [(key, rebuild(item, tensors)) for key, item in zip(layout.keys, layout.items, strict=True)]
    if layout.type is dict:
        return dict(items)
    if dataclasses.is_dataclass(layout.type):  # as Hugging Face's ModelOutput, which is a mapping as well
        return layout.type(**dict(items))
    if hasattr(layout.type, "__missing__"):  # a defaultdict; its factory is lost
        made: Any = layout.type()
        made.update(items)
        return made
    try:
        made = layout.type(dict(items))
    except TypeError:
        made = layout.type()
        for key, item in items:
            made[key] = item
    for name, item in layout.attributes:
        object.__setattr__(made, name, item)
    return made
