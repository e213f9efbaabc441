"""What an autograd function of the user's uses of Python, beside tensors and numbers that it is given.

Its forward and backward run on one stage, later than the step's Python. So what they use must be what it was when the
step called them, and they must leave it alone::

    step    STRENGTH = 0.1    Reverse.apply(x)    STRENGTH = 0.2    Reverse.apply(x)
    stage                                                           forward, forward      both with 0.2: an error
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_pipeline._names import PACKAGES
from lightning_pipeline.partition.attributes import attributes_of
from lightning_pipeline.recording.operation import TakenAlong, is_atom

_METHODS = ("forward", "backward", "setup_context")
_OTHERS = frozenset(("torch", "numpy", "triton", "lightning_pipeline", *PACKAGES)) | sys.stdlib_module_names
"""Modules whose functions and attributes count as fixed."""
_MAX_DEPTH = 3
_MAX_FUNCTIONS = 64

Found = list[tuple[str, Any]]


class FunctionState(TakenAlong):
    """What a function uses at one time.

    Attributes:
        found: names with values: what cannot change, arrays as bytes, and for containers what is in them.
    """

    __slots__ = ("found",)

    def __init__(self, found: Found) -> None:
        self.found = found

    def __repr__(self) -> str:  # by which those of two steps are compared
        return repr(self.found)


def changed(before: Found, now: Found) -> str | None:
    """The name of what is another one now; None if nothing is."""
    then, later = dict(before), dict(now)
    names = (name for name in {**later, **then} if not _is_same(then.get(name, _EMPTY), later.get(name, _EMPTY)))
    return next(names, None)


def state_of(cls: type, args: Sequence[Any]) -> FunctionState | None:
    """What a function uses now, given these arguments; None if that is nothing but tensors and numbers."""
    found = use_of(cls, objects_in(args))
    return FunctionState(found) if found else None


def objects_in(args: Iterable[Any]) -> list[Any]:
    """Objects among arguments, and containers that hold no tensors."""
    found = []
    for value in args:
        if isinstance(value, Tensor) or is_atom(value):
            continue
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
        if items is None:
            found.append(value)
        else:
            found += objects_in(items)
            if not any(isinstance(item, Tensor) for item in items):
                found.append(value)
    return found


def use_of(cls: type, objects: Sequence[Any]) -> Found:
    """What a function uses of Python, `objects` among its arguments included."""
    found: Found = []
    names, functions = _code_of(cls)
    for function, used in functions:
        scope = function.__globals__
        for name in used:
            if name in scope:
                note_use(found, name, scope[name], names, 0)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell is not None and (content := _content(cell)) is not _EMPTY:
                note_use(found, name, content, names, 0)
    for base in cls.__mro__:
        if not is_of_others(base.__module__):
            for name, value in vars(base).items():
                if name in names and not isinstance(value, (staticmethod, classmethod, FunctionType, property)):
                    note_use(found, f"{cls.__name__}.{name}", value, names, 0)
    for place, value in enumerate(objects):
        label = f"its argument {type(value).__name__}"
        note_use(found, label if len(objects) == 1 else f"{label} ({place})", value, names, 0)
    return found


_EMPTY = object()
"""Stands for what is not there."""


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


@lru_cache(maxsize=256)
def _code_of(cls: type) -> tuple[frozenset[str], list[tuple[FunctionType, tuple[str, ...]]]]:
    """All names in the code of a function, and the functions that it is made of, each with the globals that it uses."""
    pending = [
        function
        for base in cls.__mro__
        if not is_of_others(base.__module__)
        for member in vars(base).values()
        if isinstance(function := getattr(member, "__func__", member), FunctionType)
    ]
    functions: list[tuple[FunctionType, tuple[str, ...]]] = []
    names: set[str] = set()
    seen: set[CodeType] = set()
    while pending and len(seen) < _MAX_FUNCTIONS:
        function = inspect.unwrap(pending.pop())
        if function.__code__ in seen or is_of_others(function.__module__):
            continue
        seen.add(function.__code__)
        names |= (own := names_in(function.__code__))
        cells = [content for cell in function.__closure__ or () if (content := _content(cell)) is not _EMPTY]
        scope = function.__globals__
        used = [name for name in sorted(own) if name in scope and _may_have_state(scope[name])]
        functions.append((function, tuple(used)))
        reached = (*(scope[name] for name in own if name in scope), *cells)
        pending += [one for one in reached if isinstance(one, FunctionType)]
    return frozenset(names), functions


@lru_cache(maxsize=1024)
def names_in(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes that code uses, with that of functions within."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*inner)


def is_of_others(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _OTHERS


def _is_fixed(value: Any) -> bool:
    """Whether a value is code, and not what it works with."""
    if isinstance(value, ModuleType):
        return is_of_others(value.__name__)
    return isinstance(value, (type, FunctionType)) or (is_of_others(type(value).__module__) and callable(value))


def _may_have_state(value: Any) -> bool:
    return not _is_fixed(value) or (isinstance(value, FunctionType) and not is_of_others(value.__module__))


def note_use(found: Found, name: str, value: Any, names: frozenset[str], depth: int) -> None:
    """Note a value that code uses which has these names in it."""
    if isinstance(value, MethodType):
        value, names = value.__self__, names | names_in(value.__func__.__code__)
    if isinstance(value, FunctionType):
        for inner in [inner for inner in vars(value) if inner in names]:
            note_use(found, f"{name}.{inner}", vars(value)[inner], names, depth + 1)
    if _is_fixed(value) and not isinstance(value, nn.Module):
        return
    if isinstance(value, np.ndarray):
        value = (value.dtype.str, value.shape, value.tobytes()) if value.dtype != object else tuple(value.flat)
    elif isinstance(value, (list, tuple, set, deque)):
        _inside(found, name, enumerate(value), names, depth)
        value = tuple(_plain(item, depth) for item in value)
    elif isinstance(value, dict):
        _inside(found, name, value.items(), names, depth)
        value = tuple((_plain(key, depth), _plain(item, depth)) for key, item in value.items())
    elif not (is_atom(value) or isinstance(value, Tensor)) and depth < _MAX_DEPTH and attributes_of(value) is not None:
        if not isinstance(value, ModuleType):
            cls: Any = type(value)
            names = names | _names_of(cls, names)
        for inner, item in _attributes(value, names):
            note_use(found, f"{name}.{inner}", item, names, depth + 1)
    found.append((name, value))


def _inside(found: Found, name: str, items: Any, names: frozenset[str], depth: int) -> None:
    """Note the attributes of objects in a container."""
    if depth < _MAX_DEPTH:
        for key, item in items:
            if not is_atom(item) and not isinstance(item, Tensor):
                note_use(found, f"{name}[{key!r}]", item, names, depth + 1)


def _plain(value: Any, depth: int) -> Any:
    """A member of a container: itself if it can be compared, else that it is this object. What is in containers has
    been noted, and arguments are put together anew.
    """
    if is_atom(value):
        return value
    is_noted = isinstance(value, (list, tuple, set, deque, dict)) and depth < _MAX_DEPTH
    return (type(value).__name__, len(value)) if is_noted else ("object", id(value))


def _attributes(value: Any, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Those of an object that the code names."""
    own = attributes_of(value)
    assert own is not None
    places = [own, *(own[kind] for kind in ("_parameters", "_buffers", "_modules") if isinstance(value, nn.Module))]
    for place in places:
        for name in [name for name in place if name in names]:
            yield name, place[name]


@lru_cache(maxsize=1024)
def _names_of(cls: type, names: frozenset[str]) -> frozenset[str]:
    """Names in the code of an object's methods that are called."""
    called = {*names, "forward"} if issubclass(cls, nn.Module) else {*names, "__call__"}
    found: set[str] = set()
    for base in cls.__mro__:
        if not is_of_others(base.__module__):
            for name, member in vars(base).items():
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if name in called and isinstance(function, FunctionType):
                    found |= names_in(function.__code__)
    return frozenset(found)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and (is_atom(one) or isinstance(one, tuple)) and repr(one) == repr(other)
