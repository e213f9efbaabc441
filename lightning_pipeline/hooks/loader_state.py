"""What the code of a loader changes in Python, which the first rank alone runs: the other ranks change the same.

A dataset that counts, a sampler with a generator of its own, a collate function that keeps what it saw: the objects
that a loader refers to are noted before a batch is fetched, and compared afterwards.

Containers of more than `LARGEST` entries are compared by what is added to them, arrays of more than `LARGEST_ARRAY`
bytes and what lies beyond `MOST` objects not at all.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline._names import PACKAGES
from lightning_pipeline.hooks import loader_changes
from lightning_pipeline.hooks.loader_changes import SENT, Change, Known, Made, Path
from lightning_pipeline.partition.attributes import Slots, slots_of
from lightning_pipeline.recording.reachable_state import is_of_others

MOST = 1000
"""Objects that are looked at. They are met in the order of their distance from the loader."""
DEEPEST = 64
"""Entries of a container whose own contents are looked at."""
LARGEST = 10_000
LARGEST_ARRAY = 1 << 18
MOST_BYTES = 1 << 20
"""That are sent of tensors and arrays for one batch."""

_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)
)
_FIXED = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType, property)
_CODE = (*_FIXED, types.FunctionType)
_OF_LOADERS = ("dataset", "batch_sampler", "sampler", "collate_fn", "generator")
_GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
_FOREIGN = tuple(f"{name}." for name in ("torch", "numpy", "lightning_pipeline", *PACKAGES))


class _Unsendable(Exception):
    """A value that only the first rank can have, such as an open file."""


class LoaderState:
    """The contents of what a loader refers to, at one time."""

    def __init__(self, loader: Any) -> None:
        self._paths: dict[int, Path] = {}
        self._kept: list[Any] = []  # so that no other object gets the same id
        self._noted: list[tuple[Callable[[Any, Any], Iterator[tuple[str, Any, Any]]], Path, Any, Any]] = []
        self._next: deque[tuple[Any, Path]] = deque([(loader, ())])
        while self._next and len(self._paths) < MOST:
            self._look_at(*self._next.popleft())

    def changes(self) -> list[Change]:
        """What has changed since."""
        found = []
        left = [MOST_BYTES]
        for differences, path, holder, content in self._noted:
            for kind, key, value in differences(holder, content):
                with suppress(
                    _Unsendable, RecursionError, TypeError
                ):  # as of a set of objects, whose places have no hash
                    change = Change(kind, path, key, self._sendable(value, left))
                    if is_picklable(change):
                        found.append(change)
        if left[0] < 0:
            _warn_of_size()
        return found

    # -- looking ------------------------------------------------------------------------------------------------------

    def _look_at(self, value: Any, path: Path) -> None:
        cls: Any = type(value)
        look = _look_of(cls)
        if look is None or id(value) in self._paths:
            return
        self._paths[id(value)] = path
        self._kept.append(value)
        look(self, value, path)

    def _note(self, differences: Any, path: Path, holder: Any, content: Any) -> None:
        self._noted.append((differences, path, holder, content))

    def _go_on(self, items: Any, path: Path, kind: str = "item") -> None:
        for key, one in items:
            if type(one) not in _PLAIN:
                self._next.append((one, (*path, (kind, key))))

    def _look_at_tensor(self, value: Tensor, path: Path) -> None:
        if not value.is_inference():
            self._note(loader_changes.of_tensor, path, value, value._version)

    def _look_at_array(self, value: Any, path: Path) -> None:
        if value.nbytes <= LARGEST_ARRAY and not value.dtype.hasobject:
            self._note(loader_changes.of_array, path, value, value.tobytes())

    def _look_at_generator(self, value: Any, path: Path) -> None:
        self._note(loader_changes.of_generator, path, value, loader_changes.state_of_generator(value))

    def _look_at_dict(self, value: dict[Any, Any], path: Path) -> None:
        self._note(loader_changes.of_dict, path, value, dict.copy(value) if len(value) <= LARGEST else len(value))
        if len(value) <= DEEPEST:
            self._go_on(dict.items(value), path)

    def _look_at_list(self, value: Any, path: Path) -> None:
        self._note(loader_changes.of_list, path, value, list(value) if len(value) <= LARGEST else len(value))
        self._look_at_tuple(value, path)

    def _look_at_tuple(self, value: Any, path: Path) -> None:
        if len(value) <= DEEPEST:
            self._go_on(enumerate(value), path)

    def _look_at_set(self, value: set[Any], path: Path) -> None:
        self._note(loader_changes.of_set, path, value, value.copy() if len(value) <= LARGEST else len(value))

    def _look_at_parts(self, value: Any, path: Path) -> None:
        """At what a method or a partial is made of."""
        names = ("__self__", "__func__") if isinstance(value, types.MethodType) else ("func", "args", "keywords")
        self._go_on(((name, getattr(value, name)) for name in names), path, "get")

    def _look_at_loader(self, value: DataLoader[Any], path: Path) -> None:
        attributes = vars(value)
        self._go_on(((name, attributes.get(name)) for name in _OF_LOADERS), (*path, ("get", "__dict__")))

    def _look_at_module(self, value: nn.Module, path: Path) -> None:
        if not _is_foreign(type(value)):
            self._look_at_object(value, path)
        if value._buffers:  # writes into them are refused (`Lending`)
            self._note(loader_changes.of_dict, (*path, ("get", "_buffers")), value._buffers, value._buffers.copy())
        for name, one in value._modules.items():
            if one is not None and (one._modules or not _is_foreign(type(one))):
                self._next.append((one, (*path, ("get", "_modules"), ("item", name))))

    def _look_at_object(self, value: Any, path: Path) -> None:
        attributes, own = vars(value), (*path, ("get", "__dict__"))
        self._note(loader_changes.of_dict, own, attributes, attributes.copy())
        self._go_on(attributes.items(), own)
        cls: Any = type(value)
        if id(cls) in self._paths or _is_foreign(cls):
            return
        self._paths[id(cls)] = path = (*path, ("get", "__class__"))
        for index, base in enumerate(cls.__mro__):
            if names := _data_of(base):
                where, content = (*path, ("base", index)), {name: vars(base).get(name) for name in names}
                self._note(loader_changes.of_attributes, where, base, content)
                self._go_on(content.items(), where, "get")
        self._look_at_globals(_globals_of_class(cls))

    def _look_at_slots(self, value: Any, path: Path) -> None:
        content = dict(Slots(value))
        self._note(loader_changes.of_attributes, path, value, content)
        self._go_on(content.items(), path, "get")

    def _look_at_function(self, value: types.FunctionType, path: Path) -> None:
        if f"{value.__module__}.".startswith(_FOREIGN):
            return
        for index, cell in enumerate(value.__closure__ or ()):
            where = (*path, ("get", "__closure__"), ("item", index))
            try:
                content = cell.cell_contents
            except ValueError:  # it has none yet
                continue
            self._note(loader_changes.of_cell, where, cell, content)
            self._next.append((content, (*where, ("get", "cell_contents"))))
        own, where = vars(value), (*path, ("get", "__dict__"))
        self._note(loader_changes.of_dict, where, own, own.copy())
        self._go_on(own.items(), where)
        self._look_at_globals(_globals_of(value.__code__, value.__module__))

    def _look_at_globals(self, found: dict[str, tuple[str, ...]]) -> None:
        for module, names in found.items():
            scope = vars(sys.modules[module])
            path: Path = (("module", module),)
            self._note(loader_changes.of_names, path, scope, {name: scope.get(name) for name in names})
            self._go_on(((name, scope.get(name)) for name in names), path)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _sendable(self, value: Any, left: list[int]) -> Any:
        """The value as it is sent, with references to what was there before."""
        cls: Any = type(value)
        if cls in _PLAIN or isinstance(value, numpy.generic):
            return value
        if (path := self._paths.get(id(value))) is not None:
            return Known(path)
        if (cls is Tensor or cls is numpy.ndarray) and left[0] >= 0:
            left[0] -= value.nbytes
            if left[0] >= 0 and not (cls is Tensor and (value.is_meta or value.requires_grad)):
                return value
            raise _Unsendable
        if cls is defaultdict:
            return defaultdict(value.default_factory, self._sendable(dict(value), left))
        if cls in SENT:
            if issubclass(cls, dict):
                return cls({key: self._sendable(one, left) for key, one in value.items()})
            items = [self._sendable(one, left) for one in value]
            return deque(items, value.maxlen) if cls is deque else cls(items)
        if isinstance(value, tuple) and hasattr(cls, "_make"):
            return cls._make(self._sendable(one, left) for one in value)
        if isinstance(value, _GENERATORS[:-1]):
            return value
        is_own = not isinstance(value, nn.Module) and _is_made_by_python(cls) and not _is_foreign(cls)
        if is_own and getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls:
            return Made(type(value), self._sendable(dict(vars(value)), left))
        raise _Unsendable


def is_picklable(value: Any) -> bool:
    """Whether a value can be sent; a dictionary's keys or its default factory may prevent it."""
    try:
        pickle.dumps(value)
    except Exception:  # of any kind, as objects pickle themselves as they like
        return False
    return True


# -- classes and functions --------------------------------------------------------------------------------------------


@functools.cache
def _look_of(cls: Any) -> Callable[[LoaderState, Any, Path], None] | None:
    """How an object of a class is looked at; None for what is plain, and for what nothing is known of."""
    if cls in _PLAIN or issubclass(cls, _FIXED):
        return None
    by_class = {Tensor: LoaderState._look_at_tensor, numpy.ndarray: LoaderState._look_at_array}
    if cls in by_class or issubclass(cls, (Tensor, numpy.ndarray)):
        return by_class.get(cls)
    looks: tuple[tuple[Any, Any], ...] = (
        (_GENERATORS, LoaderState._look_at_generator),
        (dict, LoaderState._look_at_dict),
        (tuple, LoaderState._look_at_tuple),
        ((list, deque), LoaderState._look_at_list),
        (set, LoaderState._look_at_set),
        (types.FunctionType, LoaderState._look_at_function),
        ((types.MethodType, functools.partial), LoaderState._look_at_parts),
        (nn.Module, LoaderState._look_at_module),
        (DataLoader, LoaderState._look_at_loader),
    )
    for kinds, look in looks:
        if issubclass(cls, kinds):
            return look
    if issubclass(cls, types.SimpleNamespace):
        return LoaderState._look_at_object
    if slots_of(cls) and not _is_foreign(cls):
        return LoaderState._look_at_slots
    is_known = not _is_foreign(cls) or cls.__module__.startswith("torch.utils.data.")
    return LoaderState._look_at_object if is_known and _is_made_by_python(cls) else None


def _is_foreign(cls: type) -> bool:
    """Whether a class is torch's or Lightning's own, whose attributes their code looks after."""
    return f"{cls.__module__}.".startswith(_FOREIGN)


@functools.cache
def _is_made_by_python(cls: type) -> bool:
    is_python = all(base is object or base.__flags__ & 1 << 9 for base in cls.__mro__)
    return is_python and cls.__dictoffset__ != 0 and not any(vars(base).get("__slots__") for base in cls.__mro__)


@functools.cache
def _data_of(cls: type) -> tuple[str, ...]:
    """The names of a class's attributes that are data."""
    if _is_foreign(cls) or cls is object or not _is_made_by_python(cls):
        return ()
    return tuple(
        name
        for name, value in vars(cls).items()
        if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")
    )


@functools.cache
def _globals_of_class(cls: type) -> dict[str, tuple[str, ...]]:
    """The names in each module that the code of a class uses as data."""
    found: dict[str, tuple[str, ...]] = {}
    for base in cls.__mro__:
        if not _is_foreign(base):
            for member in vars(base).values():
                if isinstance(member, types.FunctionType):
                    for module, names in _globals_of(member.__code__, member.__module__).items():
                        found[module] = tuple(dict.fromkeys((*found.get(module, ()), *names)))
    return found


@functools.cache
def _globals_of(code: types.CodeType, module: str) -> dict[str, tuple[str, ...]]:
    """The names in a function's module that its code uses as data, or as functions of the same module, and those of
    data in other modules that it names."""
    scope = vars(sys.modules[module]) if module in sys.modules else {}
    todo, named, names = [code], dict[str, None](), dict[str, Any]()
    while todo:
        one = todo.pop()
        named.update(dict.fromkeys(one.co_names))
        names.update((name, scope[name]) for name in one.co_names if name in scope)
        todo += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    own = tuple(
        name
        for name, value in names.items()
        if not isinstance(value, _FIXED) and (not isinstance(value, types.FunctionType) or value.__module__ == module)
    )
    found = {module: own} if own else {}
    for value in names.values():
        if isinstance(value, types.ModuleType) and not is_of_others(value.__name__) and value.__name__ != module:
            data = tuple(name for name in named if name in vars(value) and not isinstance(vars(value)[name], _CODE))
            if data and sys.modules.get(value.__name__) is value:
                found[value.__name__] = data
    return found


@functools.cache
def _warn_of_size() -> None:
    warnings.warn(
        f"code of a data loader changes or keeps more than {MOST_BYTES >> 20} MiB of tensors or arrays at once. The "
        f"first rank alone runs it, and the others do not get them: use them in the loader, not in steps and hooks",
        stacklevel=2,
    )
