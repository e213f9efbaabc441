"""Python state of modules: plain values and containers whose changes can be detected."""

from __future__ import annotations

import enum
import hashlib
import logging
import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.attributes import slots_of
from lightning_pipeline.recording.inference import CallError
from lightning_pipeline.recording.object_state import (
    DICT,
    LIST,
    PLAIN,
    Kind,
    Path,
    Walk,
    is_made_by_python,
    is_of_others,
    uses_of,
)

_PLAIN: Any = tuple(PLAIN)
_FIXED = (enum.Enum, torch.layout, torch.memory_format, logging.Logger, types.MethodDescriptorType, type(Ellipsis))
_USED = (list, tuple, dict, set, frozenset, deque, *_PLAIN)
"""What counts of globals and closures of modules' methods."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_call_impl", "_compiled_call_impl"}


def _own(attributes: dict[str, Any], _: Any = None) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _OF_MODULES}


_MODULE = Kind(_own, DICT.differences)


class Unclear(CallError):
    """It cannot be told what a module does besides computing."""


class State(Walk):
    """What some modules have in Python at one time.

    Attributes:
        key: a digest of it, the same on all ranks.

    Raises:
        Unclear: they have something whose changes cannot be told.
    """

    MOST = DEEPEST = sys.maxsize
    LOOKS = (
        ((*_PLAIN, *_FIXED), "pass_over"),
        (nn.Module, "look_at_module"),
        (Tensor, "look_at_tensor"),
        *Walk.LOOKS,
        (frozenset, "look_at_set"),
        (object, "look_at_object"),
    )

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        super().__init__((module, (("item", number),)) for number, module in enumerate(modules))
        texts = (text for _, _, holder, content in self.noted for text in _texts(holder, content))
        self.key = hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()

    def is_now(self) -> bool:
        """Whether they have the same now."""
        return not any(kind.has_changed(holder, content) for kind, _, holder, content in self.noted)

    def look_at_module(self, value: nn.Module, path: Path) -> None:
        if not any(value is one for one in self._modules):
            raise Unclear(f"it refers to a {type(value).__name__} that is not in it")
        content = _own(vars(value))
        self.note(_MODULE, path, vars(value), content)
        self.go_on(content.items(), path)
        for base in type(value).__mro__:
            if id(base) not in self.paths and not is_of_others(base.__module__):
                self.pass_over(base)
                for function in [one for one in vars(base).values() if isinstance(one, types.FunctionType)]:
                    for holder, content, where in uses_of(function, path):
                        used = {name: one for name, one in content.items() if type(one) in _USED}
                        self.look_at_attributes(holder, used, where)

    def look_at_function(self, value: types.FunctionType, path: Path) -> None:
        for holder, content, where in uses_of(value, path):
            if isinstance(holder, types.CellType):
                self.look_at_attributes(holder, content, where)

    def look_at_tensor(self, value: Tensor, path: Path) -> None:
        raise Unclear("it keeps a tensor that is neither a parameter nor a buffer")

    def look_at_tuple(self, value: Any, path: Path) -> None:
        self.note(LIST, path, value, list(value))
        super().look_at_tuple(value, path)

    def look_at_set(self, value: Any, path: Path) -> None:
        if not all(isinstance(one, _PLAIN) for one in value):
            raise Unclear("it has a set of objects")
        super().look_at_set(value, path)

    def look_at_generator(self, value: Any, path: Path) -> None:
        raise Unclear(f"it has a {type(value).__name__}, whose state is not in attributes")

    look_at_array = look_at_generator

    def look_at_object(self, value: Any, path: Path) -> None:
        cls: Any = type(value)
        if not is_made_by_python(cls) or not hasattr(value, "__dict__"):
            self.look_at_generator(value, path)
        if slots_of(cls):
            raise Unclear(f"it has a {cls.__name__}, whose state is in slots")
        self.look_at_space(vars(value), path)


def _texts(holder: Any, content: Any) -> Iterator[str]:
    yield f"{type(holder).__name__} {len(content)}"
    items = sorted(content, key=repr) if isinstance(holder, (set, frozenset)) else content
    for one in chain(items, content.values() if isinstance(content, dict) else ()):
        yield f"{type(one).__name__} {one!r}" if isinstance(one, _PLAIN) else type(one).__name__


@contextmanager
def as_it_was(modules: Sequence[nn.Module], state: State) -> Iterator[None]:
    """While entered, modules have what they had when `state` was taken."""
    if state.is_now():
        yield
        return
    now = State(modules)
    state.put_back()
    try:
        yield
    finally:
        now.put_back()
