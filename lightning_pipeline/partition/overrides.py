"""Attributes of module instances: temporary overrides, and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Override = Callable[[Any, str, Any], None]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes that have a module's hooks on its calls."""
_NONE = object()


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called."""
    # A scripted module's class cannot be asked.
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is not nn.Module.forward


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """A module's hooks on its calls, by kind."""
    return [getattr(module, kind) for kind in HOOKS]


class InPlaceOf:
    """A function that an object has for a while in place of another one, which it is in a pickle of the object."""

    def __init__(self, original: Any, function: Callable[..., Any]) -> None:
        self.original, self._function = original, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlaceOf:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.original,)  # which returns a function itself


@contextmanager
def overridden() -> Iterator[Override]:
    """Gives a function that sets an attribute of an object, a module's past `nn.Module.__setattr__`, until this is
    left. What somebody else has set there meanwhile stays."""
    before: list[tuple[Any, str, Any, Any]] = []

    def override(owner: Any, name: str, value: Any) -> None:
        attributes = vars(owner)
        before.append((owner, name, attributes.get(name, _NONE), value))
        attributes[name] = value

    try:
        yield override
    finally:
        for owner, name, old, value in reversed(before):
            attributes = vars(owner)
            if attributes.get(name) is not value:
                continue
            if old is _NONE:
                del attributes[name]
            else:
                attributes[name] = old
