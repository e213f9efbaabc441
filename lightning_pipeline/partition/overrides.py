"""Temporary attributes of objects, classes and modules; whether modules have a forward, and hooks."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
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


class InPlaceOf(partial[Any]):
    """A function that temporarily replaces an attribute of an object; a pickle of the object has the original.

    It has the signature, the name, the code and the other attributes of the original, as users look at them: containers
    give their layers those arguments that their forwards take. It is a `partial`, as a class with ``__call__`` takes
    longer.
    """

    def __new__(cls, original: Any, function: Callable[..., Any]) -> InPlaceOf:
        made = super().__new__(cls, function)
        made.original = original
        for name in ("__doc__", "__module__"):  # which the class has as well
            vars(made)[name] = getattr(original, name, None)
        return made

    original: Any

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__" and not hasattr(self.original, name):
            return inspect.signature(self.original)
        return getattr(self.original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.original,)  # copy.copy of a function is the function itself


class MethodInPlaceOf(InPlaceOf):
    """A function that temporarily replaces a method of an object, by an attribute. A copy or pickle of the object has
    the method.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.original.__self__))
        return self if copied is None else MethodType(self.original.__func__, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.original.__self__, self.original.__name__)


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


@contextmanager
def called_when_imported(names: Collection[str], function: Callable[[Any], None]) -> Iterator[None]:
    """While entered, a function is called with each module of these names: now, or as soon as it has been imported."""
    for name in names:
        if name in sys.modules:
            function(sys.modules[name])
    finder = _Finder([name for name in names if name not in sys.modules], function)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    def __init__(self, names: Collection[str], function: Callable[[Any], None]) -> None:
        self._names = set(names)
        self._function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._names:
            return None
        self._names.remove(name)  # it is looked for by the others now
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of this very object; delete it for `_NONE`."""
    is_class = isinstance(owner, type)
    if value is _NONE:
        delattr(owner, name) if is_class else vars(owner).pop(name)
    elif is_class:
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value
