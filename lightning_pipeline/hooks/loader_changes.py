"""Changes of Python objects: how each kind of object is compared, and how another rank changes its own alike."""

from __future__ import annotations

import operator
import pickle
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

SENT = (list, tuple, dict, set, frozenset, deque, Counter, OrderedDict)
"""Containers that are sent with what is in them."""

Path = tuple[tuple[str, Any], ...]
"""How an object is reached from the loader, a kind of step and its name each."""


class Change(NamedTuple):
    """The object at a path has other contents: an entry, the entries from one on, or all of it."""

    kind: str
    path: Path
    key: Any
    value: Any


class Known(NamedTuple):
    """Takes the place of an object that was there before."""

    path: Path


class Made(NamedTuple):
    """Takes the place of a new object of a class of the user's."""

    cls: type
    attributes: dict[str, Any]


def apply(changes: list[Change], loader: Any) -> None:
    """On another rank: change what the first rank's code has changed."""

    def received(value: Any) -> Any:
        cls = type(value)
        if cls is Known:
            return _found(value.path, loader)
        if cls is Made:
            made = value.cls.__new__(value.cls)
            vars(made).update(received(value.attributes))
            return made
        if cls is defaultdict:
            return defaultdict(value.default_factory, received(dict(value)))
        if isinstance(value, dict):
            return cls({key: received(one) for key, one in value.items()})
        if cls is deque:
            return deque(map(received, value), value.maxlen)
        if cls in SENT:
            return cls(map(received, value))
        return cls._make(map(received, value)) if isinstance(value, tuple) and hasattr(cls, "_make") else value

    # All are found before any is changed: paths lead through what was there before.
    found = []
    for change in changes:
        with suppress(LookupError, AttributeError, TypeError):  # within what only the first rank has, such as a file
            found.append((change, _found(change.path, loader), received(change.value)))
    for change, holder, value in found:
        _SETTERS[change.kind](holder, change.key, value)


def _found(path: Path, loader: Any) -> Any:
    found = loader
    for kind, name in path:
        if kind == "get":
            found = getattr(found, name)
        elif kind == "item":
            found = found[name]
        elif kind == "base":
            found = found.__mro__[name]
        else:
            found = vars(sys.modules[name])
    return found


# -- what differs, by the kind of object: (kind of change, key, value) ------------------------------------------------


def of_dict(holder: dict[Any, Any], content: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(content, int):
        for key in list(holder)[content:] if len(holder) > content else ():
            yield "entry", key, holder[key]
        return
    if (
        len(holder) == len(content)
        and all(map(operator.is_, holder.values(), content.values()))
        and [*holder] == [*content]
    ):
        return
    for key in content:
        if key not in holder:
            yield "less", key, None
    for key, value in holder.items():
        if key not in content or content[key] is not value:
            yield "entry", key, value


def of_names(holder: dict[str, Any], content: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, value in content.items():
        if (now := holder.get(name)) is not value:
            yield "entry", name, now


def of_list(holder: Any, content: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(content, int):
        if len(holder) > content:
            yield "entries", content, list(holder)[content:]
        return
    if len(holder) == len(content) and all(map(operator.is_, holder, content)):
        return
    same = 0
    for one, other in zip(holder, content, strict=False):
        if one is not other:
            break
        same += 1
    if same < len(holder) or same < len(content):
        yield "entries", same, list(holder)[same:]


def of_set(holder: set[Any], content: Any) -> Iterator[tuple[str, Any, Any]]:
    if len(holder) != content if isinstance(content, int) else holder != content:
        yield "all", None, holder.copy()


def of_attributes(holder: Any, content: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, value in content.items():
        if (now := getattr(holder, name, None)) is not value:
            yield "attribute", name, now


def of_cell(holder: Any, content: Any) -> Iterator[tuple[str, Any, Any]]:
    if holder.cell_contents is not content:
        yield "attribute", "cell_contents", holder.cell_contents


def of_tensor(holder: Tensor, content: int) -> Iterator[tuple[str, Any, Any]]:
    if holder._version != content:
        yield "data", None, holder.detach().clone()


def of_array(holder: Any, content: bytes) -> Iterator[tuple[str, Any, Any]]:
    if holder.tobytes() != content:
        yield "data", None, holder.copy()


def of_generator(holder: Any, content: bytes) -> Iterator[tuple[str, Any, Any]]:
    if (now := state_of_generator(holder)) != content:
        yield "state", None, now


def state_of_generator(generator: Any) -> bytes:
    """The state of a generator of random numbers."""
    if isinstance(generator, torch.Generator):
        return pickle.dumps(generator.get_state().numpy())
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, numpy.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.get_state())


# -- the same change on another rank ----------------------------------------------------------------------------------


def _set_entries(holder: Any, start: int, value: list[Any]) -> None:
    while len(holder) > start:
        holder.pop()
    holder.extend(value)


def _set_all(holder: Any, _: Any, value: Any) -> None:
    holder.clear()
    holder.update(value)


def _set_data(holder: Any, _: Any, value: Any) -> None:
    if type(holder) is Tensor and holder.shape == value.shape:
        with torch.no_grad():
            holder.copy_(value)
    elif isinstance(holder, numpy.ndarray) and holder.shape == value.shape:
        holder[...] = value


def _set_state(holder: Any, _: Any, value: bytes) -> None:
    state = pickle.loads(value)
    if isinstance(holder, torch.Generator):
        holder.set_state(torch.from_numpy(state.copy()))
    elif isinstance(holder, random.Random):
        holder.setstate(state)
    elif isinstance(holder, numpy.random.Generator):
        holder.bit_generator.state = state
    else:
        holder.set_state(state)


_SETTERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "entry": operator.setitem,
    "less": lambda holder, key, _: holder.pop(key, None),
    "entries": _set_entries,
    "all": _set_all,
    "attribute": setattr,
    "data": _set_data,
    "state": _set_state,
}
