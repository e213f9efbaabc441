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
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
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
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from lightning_pipeline.partition.attributes import attributes_of
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.rng import python_states
from lightning_pipeline.recording.object_state import in_cell, is_of_others, names_in, parts_of
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

T = TypeVar("T")
State = list[Any]


class Places:
    """The places that functions and objects can change.

    Args:
        labels: what objects are called, by their ids; others go by the names of their classes.
        of_use: all that the code works with by name, whether it can change it or not, as it is compared later: what is
            in containers, and which tensors there are. No random states.

    Attributes:
        names: of the places.
        reached: what was searched, which keeps its ids from being given to others.
    """

    def __init__(self, roots: Iterable[Any], labels: Mapping[int, str] | None = None, *, of_use: bool = False) -> None:
        search = _Search(labels or {}, of_use)
        search.run(roots)
        self.reached = search.reached
        self._of_use = of_use
        self._places: list[tuple[str, Any, str]] = []
        self._cells: list[tuple[str, Any]] = []
        for value in search.reached.values():
            self._add(value, search)
        self.names = [name for name, *_ in (*self._places, *self._cells)]
        self._draws = search.draws and not of_use
        if self._draws:
            self.names += ["the state of Python's generator", "the state of numpy's generator"]
        self._led_to = self._leading() if of_use else []

    def _add(self, value: Any, search: _Search) -> None:
        space: Any = attributes_of(value)
        if space is None:
            return
        names = search.names | search.stored
        if isinstance(value, FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            self._cells += (one for one in cells if not self._of_use or self._counts(in_cell(one[1])))
            self._note("", value.__globals__, names_in(value.__code__), search.stored)
        owner = value if isinstance(value, (type, FunctionType, ModuleType)) else type(value)
        if not isinstance(owner, type) or is_of_others(owner.__module__) or (self._of_use and owner is value):
            names &= space.keys()
        if isinstance(value, nn.Module):
            if "register_buffer" in names or not search.stored.isdisjoint(value._buffers):
                self._places.append((f"a buffer of {owner.__name__}", space, "_buffers"))
            names -= _OF_MODULES
        self._note(f"{search.labels.get(id(value), owner.__name__)}.", space, names, search.stored)

    def _note(self, prefix: str, space: Any, names: Iterable[str], stored: frozenset[str]) -> None:
        self._places += (
            (prefix + name, space, name) for name in names if name in stored or self._counts(space.get(name, _NOTHING))
        )

    def _counts(self, value: Any) -> bool:
        """Whether a value counts where no code sets it."""
        if self._of_use:
            return value is not _NOTHING and not _is_fixed(value)
        return value is None or isinstance(value, (*_CONTAINERS, *_WITH_STATE, Tensor))

    def now(self, direct: Iterable[Any] = ()) -> State:
        """What is in the places.

        Args:
            direct: containers that the function was given.
        """
        found = [_content(space.get(name, _NOTHING), self._of_use) for _, space, name in self._places]
        found += [_content(cell, self._of_use) for _, cell in self._cells]
        if self._draws:
            found += python_states()
        return found + [_content(one, self._of_use) for one in direct]

    def lead_where_they_did(self) -> bool:
        """Whether other objects than those that were searched are in no place of use."""
        return is_same(self._leading(), self._led_to)

    def _leading(self) -> State:
        return [None if is_atom(one) else one for one in self.now()]

    def changed(self, before: State, after: State, direct: Sequence[str] = ()) -> list[str]:
        """What differs between two looks: attributes by their owner's class, and others by name.

        Args:
            direct: the names of the containers.
        """
        names = (*self.names, *(direct or ["what it was given"] * (len(before) - len(self.names))))
        found = (name for name, one, other in zip(names, before, after, strict=True) if not is_same(one, other))
        return list(dict.fromkeys(found))


class Look:
    """A look at what a call may change, before it.

    Args:
        known: places of functions, to which new ones are added.
    """

    def __init__(self, known: OrderedDict[Any, Places], function: Any, args: Iterable[Any]) -> None:
        roots, self._direct, key = roots_of((function, *args))
        places = self._places = known_or_new(known, key, lambda: Places(roots))
        self._before = places.now(self._direct)

    def changed(self) -> list[str]:
        after = self._places.now(self._direct)
        if len(after) == len(self._before) and all(map(is_same, self._before, after)):
            return []
        return self._places.changed(self._before, after)


def known_or_new(known: OrderedDict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """What is remembered under a key, or else is made."""
    if key in known:
        known.move_to_end(key)
    else:
        known[key] = make()
        if len(known) > _MAX_KNOWN:
            known.popitem(last=False)
    return known[key]


def roots_of(values: Iterable[Any]) -> tuple[list[Any], list[Any], Any]:
    """What a call begins with, taken apart: functions and objects, containers, and what tells them from others."""
    roots: list[Any] = []
    containers: list[Any] = []
    key: list[int] = []
    taken: dict[int, Any] = {}  # what leads on, perhaps to itself
    pending = [(value, 0) for value in values]
    while pending:
        value, depth = pending.pop()
        if value is None or isinstance(value, Tensor) or (is_atom(value) and not isinstance(value, FunctionType)):
            continue
        if id(value) in taken:
            continue
        parts = parts_of(value, _LONG)
        if parts is not None:
            taken[id(value)] = value
        if parts is None:
            key += (id(value), len(attributes_of(value) or ()))
            roots.append(value)
        elif isinstance(value, FunctionType):
            # A function within another is a new one each time; what is in its cells mostly is not.
            containers += value.__closure__ or ()
            key.append(id(value.__code__))
            roots.append(value)
        elif isinstance(value, (list, dict, set, deque)):
            containers.append(value)
        depth += isinstance(value, (list, tuple, dict, set, deque))
        pending += [(one, depth) for one in parts or () if depth <= _MAX_DEPTH]
    return roots, containers, tuple(key)


class _Search:
    """Follows code to what it names."""

    def __init__(self, labels: Mapping[int, str], of_use: bool) -> None:
        self.labels = dict(labels)
        self._of_use = of_use
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
        parts = parts_of(value, _LONG)
        yield from parts or ()
        if isinstance(value, FunctionType):
            yield from value.__defaults__ or ()
            yield from (value.__kwdefaults__ or {}).values()
            if (inner := inspect.unwrap(value)) is not value:
                yield inner
        elif isinstance(value, type):
            yield from value.__mro__[1:]
        elif parts is None and not isinstance(value, ModuleType):
            yield type(value)
            if isinstance(value, nn.Module) and not self._of_use:
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
            if isinstance(value, nn.Module) and self._of_use:
                space = {**value._modules, **space}
        for name in [name for name in names if name in space]:
            found = space[name]
            if isinstance(value, nn.Module) and name in _OF_MODULES:
                continue
            if id(value) in self.labels:
                self.labels.setdefault(id(found), f"{self.labels[id(value)]}.{name}")
            if isinstance(found, property):
                yield from (one for one in (found.fget, found.fset) if one is not None)
            else:
                yield getattr(found, "__func__", found) if isinstance(found, (staticmethod, classmethod)) else found


def _is_fixed(value: Any) -> bool:
    """Whether a value is code, and not what it works with."""
    if isinstance(value, ModuleType):
        return is_of_others(value.__name__)
    return isinstance(value, (type, FunctionType)) or (is_of_others(type(value).__module__) and callable(value))


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


def _content(value: Any, of_use: bool, depth: int = 0) -> Any:
    """What is compared of a value. Of use, two containers or generators with the same in them are alike."""
    kind = type(value)
    show = _SHOWN.get(kind)
    if show is None:
        show = _SHOWN[kind] = next((one for base, one in _SHOWING if issubclass(kind, base)), _itself)
    if show is _itself:
        return value
    shown = show(value, of_use, depth)
    return shown if of_use else (value, shown)


def _itself(value: Any, of_use: bool, depth: int) -> Any:
    return value


def _tensor(value: Any, of_use: bool, depth: int) -> Any:
    if of_use:  # as an object: what is in it comes to stages as to one process
        return (value,)
    return value._pl_value if isinstance(value, Placeholder) else value._version


def _mapping(value: Any, of_use: bool, depth: int) -> Any:
    if len(value) > _LONG or depth > _MAX_DEPTH:
        return len(value)
    return [(key, _content(item, of_use, depth + 1)) for key, item in value.items()]


def _sequence(value: Any, of_use: bool, depth: int) -> Any:
    if len(value) > _LONG or depth > _MAX_DEPTH:
        return len(value), value[-1] if len(value) else None
    return [_content(item, of_use, depth + 1) for item in value]


def _set(value: Any, of_use: bool, depth: int) -> Any:
    return len(value), sum(map(hash, value)) if len(value) <= _LONG else 0


def _array(value: np.ndarray, of_use: bool, depth: int) -> Any:
    is_looked_at = (of_use or value.nbytes <= _LARGE) and value.dtype != object
    return value.dtype.str, value.shape, zlib.crc32(value.tobytes()) if is_looked_at else 0


def _shown_by(show: Callable[[Any], Any]) -> Callable[[Any, bool, int], Any]:
    return lambda value, of_use, depth: show(value)


_SHOWING: tuple[tuple[Any, Callable[[Any, bool, int], Any]], ...] = (
    (Tensor, _tensor),
    (np.ndarray, _array),
    (str, _itself),
    (MutableMapping, _mapping),
    ((MutableSequence, tuple, deque), _sequence),
    ((MutableSet, frozenset), _set),
    (CellType, lambda value, of_use, depth: _content(in_cell(value), of_use, depth)),
    (random.Random, _shown_by(random.Random.getstate)),
    (np.random.Generator, _shown_by(lambda value: repr(value.bit_generator.state))),
    (np.random.RandomState, _shown_by(lambda value: repr(value.get_state()))),
    (itertools.count, _shown_by(repr)),
    (_ITERATORS, _shown_by(lambda value: object())),  # what it is at cannot be told: it counts as changed
)
_SHOWN: dict[type, Callable[[Any, bool, int], Any]] = {}


def is_same(one: Any, other: Any) -> bool:
    """Whether two contents are alike: the same objects, or equal values of Python's own types."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return is_atom(one) and repr(one) == repr(other)
