"""Restores what a step changes in a module, and in the Python objects that the module reaches.

Measuring where to cut runs the user's step several times before the run does. Whatever that leaves behind, such as a
count, a meter's sums or a random generator that has advanced, would make the run differ from one process::

    root ── modules ── attributes ── lists, dictionaries, meters, arrays, generators, closures ...
                    └─ globals and class attributes that their methods name

All of these are walked before the step and restored after it. State that cannot be restored, such as the position of a
generator function, is an error if it has changed.
"""

from __future__ import annotations

import abc
import argparse
import collections
import contextvars
import copy
import functools
import gc
import itertools
import os
import random
import sys
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Generic, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipeline import _torch
from lightning_pipeline._names import PACKAGES
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.placeholder import Placeholder, become

MAX_ITEMS = 1000
"""Longer collections are tables, not what a step collects: their items are restored, but not what is in these."""
_MAX_OBJECTS = 100_000
_MAX_ARRAY_BYTES = 1 << 28
_PLAIN = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type, range, slice, torch.dtype, torch.device),
        *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
    )
)
_LIBRARIES = frozenset({"torch", "numpy", "lightning_pipeline", *PACKAGES, *sys.stdlib_module_names} - {"__main__"})
"""Their functions and objects are left alone: restoring a part of their state could make it inconsistent."""
_DATA = ("torch.utils.data.dataset", "torch.utils.data.sampler")
"""Their classes have no state but what the user's subclasses keep in attributes."""
_MAX_DATA_BYTES = 1 << 24
"""Larger tensors and arrays of a dataset are its data, which steps do not change."""
_OPEN = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
"""Classes of the standard library whose objects are what the user puts into them."""
_RUNNING = ("_thread", "threading", "queue", "multiprocessing", "concurrent", "asyncio", "socket", "subprocess")
"""Objects that hold one of these change by themselves, and are left alone as well."""
_COPIED: tuple[type, ...] = (
    itertools.count,
    itertools.cycle,
    type(iter([])),
    type(iter(())),
    type(iter(range(1))),
    type(iter("")),
)


@contextmanager
def left_as_it_was(root: nn.Module, others: Iterable[object] = ()) -> Iterator[None]:
    """While entered, steps may run; afterwards buffers, attributes and what they refer to are as before.

    Buffers and other tensors that a module keeps are restored in place. So are parameters that a step was seen to write
    into (`about_to_write`), such as a teacher's averages: copies of all parameters would take as much memory as the
    model.

    Args:
        others: what else a step may change, such as the learning rates of optimizers.

    Raises:
        ValueError: a step has taken from a generator or a loader that cannot be set back.
    """
    found = _Snapshot(root, others)
    with _torch.DisableTorchFunction():  # in a hook, parameters of other ranks are placeholders
        data = [(parameter, parameter.detach()) for parameter in found.parameters]
    for parameter, _ in data:
        if parameter in _written:
            found.keep(parameter)
    _entered.append(found)
    try:
        yield
    finally:
        _entered.pop()
        with _torch.DisableTorchFunction():
            for parameter, data_before in data:
                if _is_plain(parameter) and parameter.data_ptr() != data_before.data_ptr():
                    parameter.data = data_before
        found.restore()
    found.check()


def about_to_write(tensor: Tensor) -> None:
    """Called before an operation writes into a tensor; if that is a parameter, it will be restored."""
    parameter = _entered[-1].with_memory.get(memory_of(tensor)) if _entered else None
    if parameter is not None and parameter not in _written:
        _written[parameter] = True
        for found in _entered:
            found.keep(parameter)


_written = WeakIdKeyDictionary()
"""Parameters that steps are known to write into."""


def _is_plain(parameter: Tensor) -> bool:
    is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return is_plain and not parameter.is_meta and not isinstance(parameter, _torch.FakeTensor)


class _Snapshot:
    """The state that a step may change."""

    def __init__(self, root: nn.Module, others: Iterable[object]) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._undo: list[Callable[[], object]] = [
            partial(_reset_environment, dict(os.environ)),
            partial(_reset_context, contextvars.copy_context()),
        ]
        self._once: list[tuple[str, Callable[[], Any], Any]] = []
        self.parameters = [parameter for parameter in root.parameters() if _is_plain(parameter)]
        """Those of modules that are kept in lists or objects, such as a teacher, are added below."""
        own = set(map(id, self.parameters))
        self._seen: dict[int, Any] = {}  # by id; it keeps the objects alive, or others might get the same id
        # As the user's code in the module writes them, however they are reached: Lightning puts its bound methods into
        # callbacks, which are visited before it.
        self._names = {id(module): f"self.{name}" if name else "self" for name, module in root.named_modules()}
        self._todo: list[tuple[str, Any]] = [(self._names[id(module)], module) for module in root.modules()]
        self._todo += [("", other) for other in others]
        while self._todo and len(self._seen) < _MAX_OBJECTS:
            self._visit(*self._todo.pop())
        others_seen = (value for value in self._seen.values() if isinstance(value, nn.Parameter) and _is_plain(value))
        self.parameters += (parameter for parameter in others_seen if id(parameter) not in own)
        self.with_memory = {memory_of(parameter): parameter for parameter in self.parameters}
        del self._todo

    def restore(self) -> None:
        for undo in self._undo:
            undo()
        with torch.no_grad():
            for tensor, values in self._tensors.values():
                if type(tensor) is Placeholder:  # a recorded step has written into it
                    become(tensor, values)
                    continue
                if tensor.shape != values.shape:  # by resize_, or the step has set its data
                    tensor.data = tensor.new_empty(values.shape)
                tensor.copy_(values)  # always: writes by batch norm's kernels do not show in the tensor's version

    def check(self) -> None:
        """Raise a ValueError if state has changed that cannot be restored."""
        for name, place_of, before in self._once:
            if place_of() != before:
                raise ValueError(
                    f"{name} gives its values once, and the step takes of them: to measure where to cut would use them "
                    f"up. Name the first module of each later stage in a stage_config"
                )

    def keep(self, tensor: Tensor) -> None:
        if id(tensor) not in self._tensors:
            with _torch.DisableTorchFunction() if isinstance(tensor, nn.Parameter) else nullcontext():
                self._tensors[id(tensor)] = (tensor, tensor.detach().clone())

    def _visit(self, name: str, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_inference() and not value.is_meta:
                self.keep(value)
        elif isinstance(value, nn.Module):
            self._visit_attributes(f"{self._names.get(id(value), name)}.", vars(value))
            self._visit_class(kind)
        elif isinstance(value, (list, dict, set, deque)):
            self._visit_collection(name, value)
        elif isinstance(value, (tuple, frozenset)):
            self._visit_items(name, value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._visit_cache(name, value)
        elif isinstance(value, types.MethodType):
            self._todo += [(f"{name}.__self__", value.__self__), (name, value.__func__)]
        elif isinstance(value, partial):
            self._todo += [(name, value.func), (name, value.args), (name, value.keywords)]
        elif isinstance(value, types.GeneratorType):
            self._once.append((name, partial(_place_of_generator, value), _place_of_generator(value)))
        elif hasattr(kind, "__next__") and hasattr(value, "_num_yielded"):  # of a DataLoader
            self._once.append((name, lambda: value._num_yielded, value._num_yielded))
        elif hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
            self._todo += [(name, part) for part in _parts_of_iterator(value)]
        elif isinstance(value, Optimizer):
            # Its state, which may be twice as large as the model, changes in updates only, and none are made.
            state = vars(value).get("state")
            self._seen[id(state)] = state
            self._visit_attributes(f"{name}.", vars(value))
        elif isinstance(value, LRScheduler):
            self._visit_attributes(f"{name}.", vars(value))
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, (torch.Generator, numpy.random.RandomState)):
            self._undo.append(partial(value.set_state, value.get_state()))  # type: ignore[arg-type]
        elif isinstance(value, numpy.random.Generator):
            self._undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, numpy.ndarray):
            if value.flags.writeable and value.nbytes <= _MAX_ARRAY_BYTES:
                self._undo.append(partial(numpy.copyto, value, value.copy()))
        else:
            self._visit_object(name, value)

    def _visit_collection(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            self._visit_attributes(f"{name}: " if name else "", value)
            return
        before = [_copied(item) for item in value] if len(value) <= MAX_ITEMS else list(value)
        self._undo.append(partial(_refill, value, before))
        self._visit_items(name, before)

    def _visit_attributes(self, name: str, home: dict[Any, Any]) -> None:
        before = [*home.items()]
        if len(home) <= MAX_ITEMS:
            before = [(key, _copied(value)) for key, value in before]
            self._todo += [(f"{name}{key}", value) for key, value in before if type(value) not in _PLAIN]
        self._undo.append(partial(_refill, home, before))

    def _visit_items(self, name: str, items: Any) -> None:
        if len(items) <= MAX_ITEMS:
            self._todo += [(name, item) for item in items if type(item) not in _PLAIN]

    def _visit_function(self, name: str, function: types.FunctionType) -> None:
        """Its closure, its attributes, and the globals that its code names, of other modules as well."""
        if _is_of_library(function.__module__):
            return
        self._visit_attributes(f"{name}.", vars(function))
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                content = cell.cell_contents
                self._undo.append(partial(_set_if_changed, cell, "cell_contents", content))
                self._todo.append((name, content))
        scope = function.__globals__
        for key in function.__code__.co_names:
            if key in scope and not isinstance(scope[key], (type, types.ModuleType)):
                self._undo.append(partial(scope.__setitem__, key, scope[key]))
                self._todo.append((key, scope[key]))
            elif isinstance(module := scope.get(key), types.ModuleType) and not _is_of_library(module.__name__):
                for one in function.__code__.co_names:
                    content = vars(module).get(one)
                    if content is not None and not isinstance(content, (type, types.ModuleType)):
                        self._undo.append(partial(_set_if_changed, module, one, content))
                        self._todo.append((f"{key}.{one}", content))

    def _visit_cache(self, name: str, function: Any) -> None:
        """What ``functools.lru_cache`` or ``functools.cache`` keeps of a function."""
        if _is_of_library(function.__module__):
            return
        self._todo.append((name, function.__wrapped__))
        before = function.cache_info()
        if before.maxsize is None and before.currsize:
            held = gc.get_referents(function)  # the results are in a plain dictionary, which can be set back exactly
            self._todo += ((name, one) for one in held if type(one) is dict and one is not vars(function))
        else:
            self._undo.append(partial(_clear_if_filled, function, before))

    def _visit_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if base is object or id(base) in self._seen or _is_of_library(base.__module__):
                continue
            self._seen[id(base)] = base
            self._todo += _caches_beside(base)
            for key, member in list(vars(base).items()):
                value = _cached_function(member)
                if isinstance(value, (types.FunctionType, functools._lru_cache_wrapper)):
                    self._todo.append((key, value))
                elif not key.startswith("__") and not hasattr(type(value), "__get__"):
                    self._undo.append(partial(_set_if_changed, base, key, value))
                    self._todo.append((f"{base.__name__}.{key}", value))

    def _visit_object(self, name: str, value: Any) -> None:
        """An object of a class that is written in Python, by the user or in a package."""
        kind = type(value)
        if isinstance(value, type) or not (isinstance(value, _OPEN) or all(map(_is_users, kind.__mro__))):
            return
        attributes = getattr(value, "__dict__", None)
        slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
        keys = [key for names in slots for key in ((names,) if isinstance(names, str) else names)]
        own = [(key, getattr(value, key)) for key in keys if hasattr(value, key)]
        contents = [*(attributes.values() if type(attributes) is dict else ()), *(content for _, content in own)]
        if isinstance(value, Dataset):
            self._pass_over_data(contents)
        if any(type(content).__module__.partition(".")[0] in _RUNNING for content in contents):
            return
        if type(attributes) is dict:
            self._visit_attributes(f"{name}.", attributes)
        for key, content in own:
            self._undo.append(partial(_set_if_changed, value, key, content))
            self._todo.append((f"{name}.{key}", content))
        self._visit_class(kind)

    def _pass_over_data(self, contents: Iterable[Any]) -> None:
        for content in contents:
            for one in content if isinstance(content, (list, tuple)) and len(content) <= MAX_ITEMS else (content,):
                if getattr(one, "nbytes", 0) > _MAX_DATA_BYTES:
                    self._seen[id(one)] = one


_entered: list[_Snapshot] = []
"""Of each active `left_as_it_was`."""


def _reset_environment(before: dict[str, str]) -> None:
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def _reset_context(before: contextvars.Context) -> None:
    """Set context variables back; one that had no value gets its default, as a variable cannot be unset."""
    for variable, value in contextvars.copy_context().items():
        if variable in before:
            if before[variable] is not value:
                variable.set(before[variable])
        else:
            with suppress(LookupError):  # it has no default
                variable.set(contextvars.Context().run(variable.get))


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _is_users(base: type) -> bool:
    """Whether a class is written in Python by the user or in a package, or is a base without state such as `object`."""
    if base in (object, abc.ABC, Generic, Protocol) or base.__module__ in _DATA:
        return True
    is_python = base.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return bool(is_python and not _is_of_library(base.__module__))


def _copied(value: Any) -> Any:
    """A copy of an iterator that can be copied, which will replace it; everything else unchanged."""
    if type(value) not in _COPIED:
        return value
    with warnings.catch_warnings(), suppress(TypeError):
        warnings.simplefilter("ignore")  # Python 3.14 will drop copies of itertools
        return copy.copy(value)
    return value


def _parts_of_iterator(value: Any) -> list[Any]:
    """The sources of an iterator such as zip or itertools.cycle."""
    with warnings.catch_warnings(), suppress(TypeError):
        warnings.simplefilter("ignore")
        reduced = value.__reduce__()
        return list(reduced[1]) if isinstance(reduced, tuple) and len(reduced) > 1 else []
    return []


def _place_of_generator(generator: Any) -> Any:
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, {key: id(value) for key, value in frame.f_locals.items()})


def _caches_beside(cls: type) -> list[tuple[str, Any]]:
    """Functions of the file of a class whose results are cached, which its methods may call in a roundabout way."""
    scope = vars(sys.modules.get(cls.__module__, object))
    return [(key, value) for key, value in scope.items() if isinstance(value, functools._lru_cache_wrapper)]


def _cached_function(member: Any) -> Any:
    """The function with a cache in a static method, a class method or a property; else the member itself."""
    inner = getattr(member, "__func__", None) or getattr(member, "fget", None)
    return inner if isinstance(inner, functools._lru_cache_wrapper) else member


def _clear_if_filled(function: Any, before: Any) -> None:
    """Empty a cache that has taken up results. Those that a bounded one had before cannot be told from them."""
    if function.cache_info().misses != before.misses:
        function.cache_clear()


def _refill(value: Any, before: list[Any]) -> None:
    """Give a collection its former items, which are pairs for a dictionary."""
    is_dictionary = isinstance(value, dict)
    parts = itertools.chain.from_iterable if is_dictionary else iter
    now = [*value.items()] if is_dictionary else [*value]
    if len(now) == len(before) and all(a is b for a, b in zip(parts(now), parts(before), strict=True)):
        return
    # Not the methods of subclasses, which may do more: Counter.update adds.
    kind: Any = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(value, kind))
    kind.clear(value)
    (kind.extend if kind in (list, deque) else kind.update)(value, before)


def _set_if_changed(owner: Any, name: str, before: Any) -> None:
    if getattr(owner, name, None) is not before:
        setattr(owner, name, before)
