"""Python state of modules: plain values and containers whose changes can be detected."""

from __future__ import annotations

import enum
import hashlib
import logging
import random
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline._names import PACKAGES
from lightning_pipeline.recording.inference import CallError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)
_FIXED = (
    *(type, enum.Enum, types.BuiltinFunctionType, types.ModuleType, torch.layout, torch.memory_format),
    *(logging.Logger, types.MethodWrapperType, types.MethodDescriptorType, type(Ellipsis), property),
)
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset, deque)
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_call_impl", "_compiled_call_impl"}
_OF_TORCH = tuple(f"{name}." for name in ("torch", "lightning_pipeline", *PACKAGES))
_MAX_DEPTH = 6


class Unclear(CallError):
    """It cannot be told what a module does besides computing."""


class State:
    """What some modules have in Python at one time.

    Attributes:
        key: a digest of it, the same on all ranks.

    Raises:
        Unclear: they have something whose changes cannot be told.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._text: list[str] = []
        self._others: list[Any] = []
        self._contents: list[tuple[Any, Any]] = []
        self._seen: dict[int, int] = {}
        self._own = {id(module) for module in modules}
        for module in modules:
            attributes = vars(module)
            self._attributes(attributes, {key: attributes[key] for key in attributes if key not in _OF_MODULES}, 0)
        for module in modules:
            for name, value in _globals_of(type(module)):
                self._text.append(name)
                self._value(value, 0)
        self.key = hashlib.blake2b("\0".join(self._text).encode(), digest_size=8).hexdigest()

    def is_now(self, other: State) -> bool:
        return (
            self._text == other._text
            and len(self._others) == len(other._others)
            and all(mine is its for mine, its in zip(self._others, other._others, strict=True))
        )

    def restore(self) -> None:
        for container, content in self._contents:
            if type(container) is dict and isinstance(content, dict):
                for key in [key for key in container if key not in content and key not in _OF_MODULES]:
                    del container[key]
                container.update(content)
            elif isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content) if isinstance(container, (set, dict)) else container.extend(content)

    def _attributes(self, container: Any, content: dict[Any, Any], depth: int) -> None:
        self._contents.append((container, content))
        for key, value in content.items():
            self._value(key, depth)
            self._value(value, depth)

    def _value(self, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._text.append(f"{type(value).__name__} {value!r}")
            return
        number = self._seen.setdefault(id(value), len(self._seen))
        self._text.append(f"{type(value).__name__} {number}")
        if number < len(self._seen) - 1:
            return
        self._others.append(value)
        if isinstance(value, _FIXED):
            return
        if depth > _MAX_DEPTH:
            raise Unclear("what it has in its attributes is nested too deeply")
        if isinstance(value, nn.Module):
            if id(value) not in self._own:
                raise Unclear(f"it refers to a {type(value).__name__} that is not in it")
        elif isinstance(value, Tensor):
            raise Unclear("it keeps a tensor that is neither a parameter nor a buffer")
        elif isinstance(value, _CONTAINERS):
            self._container(value, depth)
        elif isinstance(value, types.MethodType):
            self._value(value.__self__, depth + 1)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._value(cell.cell_contents, depth + 1)
        else:
            self._object(value, depth)

    def _container(self, value: Any, depth: int) -> None:
        self._text.append(str(len(value)))
        if isinstance(value, dict):
            self._attributes(value, dict(value), depth + 1)
            return
        items = list(value)
        if isinstance(value, (set, frozenset)):
            if not all(isinstance(item, _PLAIN) for item in items):
                raise Unclear("it has a set of objects")
            items.sort(key=repr)
        if not isinstance(value, (tuple, frozenset)):
            self._contents.append((value, items))
        for item in items:
            self._value(item, depth + 1)

    def _object(self, value: Any, depth: int) -> None:
        cls = type(value)
        is_python = all(base is object or base.__flags__ & 1 << 9 for base in cls.__mro__)  # made by a class statement
        if not is_python or not hasattr(value, "__dict__") or isinstance(value, random.Random):
            raise Unclear(f"it has a {cls.__name__}, whose state is not in attributes")
        if any(vars(base).get("__slots__") for base in cls.__mro__):
            raise Unclear(f"it has a {cls.__name__}, whose state is in slots")
        self._attributes(vars(value), dict(vars(value)), depth + 1)


@contextmanager
def as_it_was(modules: Sequence[nn.Module], state: State) -> Iterator[None]:
    """While entered, modules have what they had when `state` was taken."""
    now = State(modules)
    if now.is_now(state):
        yield
        return
    state.restore()
    try:
        yield
    finally:
        now.restore()


def _globals_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Plain values and containers in the globals and closures of a class's own code."""
    found = _GLOBALS.get(cls)
    if found is None:
        found = _GLOBALS[cls] = []
        for base in cls.__mro__:
            if not f"{base.__module__}.".startswith(_OF_TORCH):
                for member in vars(base).values():
                    if isinstance(member, types.FunctionType):
                        found.append(member)
    for function in found:
        scope = function.__globals__
        for name in function.__code__.co_names:
            value = scope.get(name)
            if value is not None and (type(value) in _CONTAINERS or type(value) in _PLAIN):
                yield name, value
        for cell in function.__closure__ or ():
            if type(cell.cell_contents) in (*_CONTAINERS, *_PLAIN):
                yield "", cell.cell_contents


_GLOBALS: dict[type, list[types.FunctionType]] = {}
