"""Temporary attributes of objects and classes; whether modules have a forward, and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

Override = Callable[[Any, str, Any], None]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module that hold the hooks on its calls."""
_NONE = object()


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called."""
    # The class of a scripted module has no forward that could be compared.
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is not nn.Module.forward


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The hooks on a module's calls, one dictionary for each kind."""
    return [getattr(module, kind) for kind in HOOKS]


class InPlaceOf:
    """A function that temporarily replaces an attribute of an object; a pickle of the object has the original."""

    def __init__(self, original: Any, function: Callable[..., Any]) -> None:
        self.original, self._function = original, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlaceOf:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.original,)  # copy.copy of a function is the function itself


class MethodInPlaceOf(partial[Any]):
    """A function that temporarily replaces a method of an object, by an attribute. A copy or pickle of the object has
    the method.
    """

    def __new__(cls, method: MethodType, function: Callable[..., Any]) -> MethodInPlaceOf:
        made = super().__new__(cls, function)
        made.method = method
        return made

    method: MethodType

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.method.__self__))
        return self if copied is None else MethodType(self.method.__func__, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.method.__self__, self.method.__name__)


@contextmanager
def overridden() -> Iterator[Override]:
    """Gives a function that sets attributes of objects, modules and classes until this is left, without
    `nn.Module.__setattr__`.

    An attribute that somebody else has set meanwhile stays.
    """
    before: list[tuple[Any, str, Any, Any]] = []

    def override(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, vars(owner).get(name, _NONE), value))
        _set(owner, name, value)

    try:
        yield override
    finally:
        for owner, name, old, value in reversed(before):
            if vars(owner).get(name) is value:
                _set(owner, name, old)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of this very object; delete it for `_NONE`."""
    is_class = isinstance(owner, type)
    if value is _NONE:
        delattr(owner, name) if is_class else vars(owner).pop(name)
    elif is_class:
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value
