"""What a function can change of Python: the attributes, containers and generators that its code comes to.

The code is searched once for each function and what it is bound to. From then on a call takes a look at some places
before it and after it, so that what changes nothing costs little more than its call::

    def run(self, x):               names    calls, seen, layer, ...
        self.calls += 1             places   self.calls, as it is set; self.seen, as it is a list
        self.seen.append(1)
        return self.layer(x)        and those of the layer
"""

from __future__ import annotations

import argparse
import dis
import inspect
import itertools
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet
from functools import lru_cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_pipeline.partition.attributes import attributes_of
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.recording.function_state import is_of_others, names_in
from lightning_pipeline.recording.operation import is_atom

_MAX_REACHED = 20_000
_MAX_KNOWN = 512
"""Functions whose places are remembered."""
_LONG = 1000
"""Elements of a container from which on only its length and its end are looked at."""
_LARGE = 1 << 18
"""Bytes of an array up to which its elements are looked at."""
_MAX_DEPTH = 3
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CONTAINERS = (MutableSequence, MutableMapping, MutableSet, deque, np.ndarray)
_ITERABLES: tuple[Iterable[Any], ...] = ([], (), {}, {}.values(), {}.items(), set(), "", b"", range(1))
_ITERATORS: tuple[type, ...] = (
    *(type(iter(one)) for one in _ITERABLES),
    *(GeneratorType, zip, map, filter, enumerate, reversed),
    *(one for one in vars(itertools).values() if isinstance(one, type) and one is not itertools.count),
)
_WITH_STATE = (random.Random, np.random.Generator, np.random.RandomState, itertools.count, *_ITERATORS)
_LEADING = (nn.Module, MethodType, partial, list, tuple, dict, set, deque, SimpleNamespace, argparse.Namespace)
"""What leads on, whoever has made it."""
_NOTHING = object()

State = list[Any]


class Places:
    """The places that a function can change.

    Attributes:
        reached: what was searched, which keeps its ids from being given to others.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        search = _Search()
        search.run(roots)
        self.reached = search.reached
        self._draws = search.draws
        self._places: list[tuple[str, Any, str]] = []
        self._cells: list[tuple[str, Any]] = []
        for value in search.reached.values():
            self._add(value, search.names, search.stored)

    def _add(self, value: Any, names: frozenset[str], stored: frozenset[str]) -> None:
        if isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self._cells.append((name, cell))
            used = names_in(value.__code__)
            attributes = vars(value)
            self._places += [
                (f"{value.__name__}.{name}", attributes, name) for name in names | stored if name in attributes
            ]
            self._places += [
                (name, value.__globals__, name) for name in used if _may_change(value.__globals__, name, stored)
            ]
            return
        space = attributes_of(value)
        if isinstance(value, ModuleType):
            self._places += [(f"{value.__name__}.{name}", space, name) for name in stored if name in vars(value)]
            return
        if space is None:
            return
        owner = value if isinstance(value, type) else type(value)
        own = _OF_MODULES if isinstance(value, nn.Module) else ()
        is_of_user = not is_of_others(owner.__module__)
        self._places += [
            (f"{owner.__name__}.{name}", space, name)
            for name in names | stored
            if name not in own and (is_of_user or name in space) and _may_change(space, name, stored)
        ]
        if own and ("register_buffer" in names or not stored.isdisjoint(value._buffers)):
            self._places.append((f"a buffer of {owner.__name__}", space, "_buffers"))

    def now(self, direct: Iterable[Any] = ()) -> State:
        """What is in the places.

        Args:
            direct: containers that the function was given.
        """
        found = [_content(space.get(name, _NOTHING)) for _, space, name in self._places]
        found += [_content(cell) for _, cell in self._cells]
        if self._draws:
            found.append(random.getstate())
            found.append(_numpy_state())
        return found + [_content(one) for one in direct]

    def changed(self, before: State, after: State) -> list[str]:
        """What differs between two looks: attributes by their owner's class, and others by name."""
        names = [name for name, _, _ in self._places] + [name for name, _ in self._cells]
        if self._draws:
            names += ["the state of Python's generator", "the state of numpy's generator"]
        names += ["what it was given"] * (len(before) - len(names))
        found = (name for name, one, other in zip(names, before, after, strict=True) if not _same(one, other))
        return list(dict.fromkeys(found))


class Look:
    """A look at what a call may change, before it.

    Args:
        known: places of functions, to which new ones are added.
    """

    def __init__(self, known: OrderedDict[Any, Places], function: Any, args: Iterable[Any]) -> None:
        roots, self._direct, key = _roots((function, *args))
        places = known.get(key)
        if places is None:
            places = Places(roots)
            if len(known) >= _MAX_KNOWN:
                known.popitem(last=False)
        else:
            del known[key]
        known[key] = self._places = places
        self._before = places.now(self._direct)

    def changed(self) -> list[str]:
        after = self._places.now(self._direct)
        if len(after) == len(self._before) and all(map(_same, self._before, after)):
            return []
        return self._places.changed(self._before, after)


def _roots(values: Iterable[Any]) -> tuple[list[Any], list[Any], Any]:
    """What a call begins with, taken apart: functions and objects, containers, and what tells them from others."""
    roots: list[Any] = []
    containers: list[Any] = []
    key: list[int] = []
    pending = [(value, 0) for value in values]
    while pending:
        value, depth = pending.pop()
        if value is None or isinstance(value, Tensor) or (is_atom(value) and not isinstance(value, FunctionType)):
            continue
        if isinstance(value, partial):
            pending += [(one, depth) for one in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, MethodType):
            pending += [(value.__func__, depth), (value.__self__, depth)]
        elif isinstance(value, (list, tuple, dict, set, deque)):
            if not isinstance(value, tuple):
                containers.append(value)
            if depth < _MAX_DEPTH and len(value) < _LONG:
                pending += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, FunctionType):
            # A function within another is a new one each time; what is in its cells mostly is not.
            containers += value.__closure__ or ()
            key.append(id(value.__code__))
            roots.append(value)
            pending += [(_in_cell(cell), depth) for cell in value.__closure__ or ()]
        else:
            key += (id(value), len(attributes_of(value) or ()))
            roots.append(value)
    return roots, containers, tuple(key)


class _Search:
    """Follows code to what it names."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset(("forward", "__call__"))
        self.stored: frozenset[str] = frozenset()
        self.draws = False
        self.reached: dict[int, Any] = {}
        self._codes: set[CodeType] = set()

    def run(self, roots: Iterable[Any]) -> None:
        pending = list(roots)
        known = -1
        while known != len(self.reached):
            known = len(self.reached)
            while pending:
                value = pending.pop()
                if len(self.reached) < _MAX_REACHED and self._take(value):
                    pending += self._inside(value)
            for value in list(self.reached.values()):  # names that came later may lead on from it
                pending += [one for one in self._named(value) if id(one) not in self.reached]

    def _take(self, value: Any) -> bool:
        """Take in a value. Returns whether it is new, and may lead on."""
        if id(value) in self.reached or value is None or isinstance(value, Tensor):
            return False
        if isinstance(value, BuiltinFunctionType):
            self.draws |= isinstance(value.__self__, (random.Random, np.random.RandomState))
            return False
        if isinstance(value, ModuleType):
            is_numpy = value is np and "random" in self.names
            self.draws |= value.__name__ in ("random", "numpy.random") or is_numpy
            if is_numpy or is_of_others(value.__name__):
                return False
        elif isinstance(value, FunctionType):
            if is_of_others(value.__module__):
                inner = inspect.unwrap(value)
                return inner is not value and self._take(inner)
            self._read(value.__code__)
        elif isinstance(value, type):
            if is_of_others(value.__module__):
                return False
        else:
            leads = not is_of_others(type(value).__module__) and attributes_of(value) is not None
            if is_atom(value) or isinstance(value, _WITH_STATE) or not (leads or isinstance(value, _LEADING)):
                return False
        self.reached[id(value)] = value
        return True

    def _read(self, code: CodeType) -> None:
        if code not in self._codes:
            self._codes.add(code)
            self.names |= names_in(code)
            self.stored |= _stored_in(code)

    def _inside(self, value: Any) -> Iterator[Any]:
        """What a value leads to, whatever code names."""
        if isinstance(value, FunctionType):
            yield from map(_in_cell, value.__closure__ or ())
            yield from value.__defaults__ or ()
            yield from (value.__kwdefaults__ or {}).values()
            if (inner := inspect.unwrap(value)) is not value:
                yield inner
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, (list, tuple, set, deque)):
            yield from value if len(value) < _LONG else ()
        elif isinstance(value, dict):
            yield from value.values() if len(value) < _LONG else ()
        elif isinstance(value, type):
            yield from value.__mro__[1:]
        elif not isinstance(value, ModuleType):
            yield type(value)
            if isinstance(value, nn.Module):
                yield from value._modules.values()
                for hooks in _HOOKS:
                    yield from vars(value)[hooks].values()

    def _named(self, value: Any) -> Iterator[Any]:
        """What a value leads to by names in the code."""
        if isinstance(value, FunctionType):
            space: Any = value.__globals__
            names: Iterable[str] = names_in(value.__code__)
        else:
            space, names = attributes_of(value) or {}, self.names
        for name in [name for name in names if name in space]:
            found = space[name]
            if isinstance(value, nn.Module) and name in _OF_MODULES:
                continue
            if isinstance(found, property):
                yield from (one for one in (found.fget, found.fset) if one is not None)
            else:
                yield getattr(found, "__func__", found) if isinstance(found, (staticmethod, classmethod)) else found


def _may_change(space: Any, name: str, stored: frozenset[str]) -> bool:
    """Whether a place is set by the code, or has something in it that can change."""
    value = space.get(name, _NOTHING)
    return name in stored or value is None or isinstance(value, (*_CONTAINERS, *_WITH_STATE, Tensor))


@lru_cache(maxsize=4096)
def _stored_in(code: CodeType) -> frozenset[str]:
    """Names that code sets, of attributes and globals, with that of functions within; all of them for `setattr`."""
    stored = {
        one.argval
        for one in dis.get_instructions(code)
        if one.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL", "STORE_NAME")
    }
    if not {"setattr", "__setattr__", "__dict__", "vars", "delattr"}.isdisjoint(code.co_names):
        strings = (one for one in code.co_consts if isinstance(one, str) and one.isidentifier())
        stored |= {*code.co_names, *strings}
    inner = (_stored_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(stored).union(*inner)


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _numpy_state() -> Any:
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return name, keys.tobytes(), *rest


def _content(value: Any, depth: int = 0) -> Any:
    """What is compared of a value."""
    kind = type(value)
    show = _SHOWN.get(kind)
    if show is None:
        show = _SHOWN[kind] = next((one for base, one in _SHOWING if issubclass(kind, base)), _itself)
    return value if show is _itself else show(value, depth)


def _itself(value: Any, depth: int) -> Any:
    return value


def _mapping(value: Any, depth: int) -> Any:
    if len(value) > _LONG or depth > _MAX_DEPTH:
        return value, len(value)
    return value, [(key, _content(item, depth + 1)) for key, item in value.items()]


def _sequence(value: Any, depth: int) -> Any:
    if len(value) > _LONG or depth > _MAX_DEPTH:
        return value, len(value), value[-1] if len(value) else None
    return value, [_content(item, depth + 1) for item in value]


def _set(value: Any, depth: int) -> Any:
    return value, len(value), sum(map(hash, value)) if len(value) <= _LONG else 0


def _array(value: np.ndarray, depth: int) -> Any:
    return value, zlib.crc32(value.tobytes()) if value.nbytes <= _LARGE and value.dtype != object else value.size


_SHOWING: tuple[tuple[Any, Callable[[Any, int], Any]], ...] = (
    (Placeholder, lambda value, depth: (value, value._pl_value)),
    (Tensor, lambda value, depth: (value, value._version)),
    (np.ndarray, _array),
    (str, _itself),
    (MutableMapping, _mapping),
    ((MutableSequence, tuple, deque), _sequence),
    ((MutableSet, frozenset), _set),
    (CellType, lambda value, depth: _content(_in_cell(value), depth)),
    (random.Random, lambda value, depth: value.getstate()),
    (np.random.Generator, lambda value, depth: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value, depth: repr(value.get_state())),
    (itertools.count, lambda value, depth: repr(value)),
    (_ITERATORS, lambda value, depth: object()),  # what it is at cannot be told: it counts as changed
)
_SHOWN: dict[type, Callable[[Any, int], Any]] = {}


def _same(one: Any, other: Any) -> bool:
    """Whether two contents are alike: the same objects, or equal values of Python's own types."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return is_atom(one) and repr(one) == repr(other)
