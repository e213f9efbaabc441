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
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Generic, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipeline import _torch
from lightning_pipeline.partition.attributes import attributes_of
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.placeholder import Placeholder, become
from lightning_pipeline.recording.object_state import DICT, LIST, Kind, Path, Walk, is_of_others

_DATA = ("torch.utils.data.dataset", "torch.utils.data.sampler")
"""Their classes have no state but what the user's subclasses keep in attributes."""
_MAX_DATA_BYTES = 1 << 24
"""Larger tensors and arrays of a dataset are its data, which steps do not change."""
_OPEN = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap)
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


class _Snapshot(Walk):
    """The state that a step may change."""

    LOOKS = (
        (Tensor, "look_at_tensor"),
        (nn.Module, "look_at_object"),
        ((Optimizer, LRScheduler), "look_at_optimizer"),
        *Walk.LOOKS,
        (frozenset, "look_at_frozenset"),
        (functools._lru_cache_wrapper, "look_at_cache"),
        (Iterator, "look_at_iterator"),
    )

    def __init__(self, root: nn.Module, others: Iterable[object]) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._undo: list[Callable[[], object]] = [
            partial(_reset_environment, dict(os.environ)),
            partial(_reset_context, contextvars.copy_context()),
        ]
        self._once: list[tuple[Path, Callable[[], Any], Any]] = []
        # The module's own come first, and are named as the user's code in the module writes them.
        own = [(module, (("name", f"self.{name}" if name else "self"),)) for name, module in root.named_modules()]
        super().__init__([*own, *((other, ()) for other in others)])
        self.parameters = [one for one in (*root.parameters(), *self._kept) if isinstance(one, nn.Parameter)]
        """With those of modules that are kept in lists or objects, such as a teacher."""
        self.parameters = list(filter(_is_plain, {id(one): one for one in self.parameters}.values()))
        self.with_memory = {memory_of(parameter): parameter for parameter in self.parameters}

    def restore(self) -> None:
        for undo in self._undo:
            undo()
        self.put_back()
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
        for path, place_of, before in self._once:
            if place_of() != before:
                raise ValueError(
                    f"{_told(path)} gives its values once, and the step takes of them: to measure where to cut would "
                    f"use them up. Name the first module of each later stage in a stage_config"
                )

    def keep(self, tensor: Tensor) -> None:
        if id(tensor) not in self._tensors:
            with _torch.DisableTorchFunction() if isinstance(tensor, nn.Parameter) else nullcontext():
                self._tensors[id(tensor)] = (tensor, tensor.detach().clone())

    @classmethod
    def is_open(cls, kind: type) -> bool:
        return issubclass(kind, _OPEN) or all(map(_is_users, kind.__mro__))

    def note(self, kind: Kind, path: Path, holder: Any, content: Any) -> None:
        if kind is DICT:
            content = {key: _copied(value) for key, value in content.items()}
        elif kind is LIST:
            content = list(map(_copied, content))
        super().note(kind, path, holder, content)

    def look_at_tensor(self, value: Tensor, path: Path) -> None:
        if not isinstance(value, nn.Parameter) and not value.is_inference() and not value.is_meta:
            self.keep(value)

    def look_at_set(self, value: set[Any], path: Path) -> None:
        super().look_at_set(value, path)
        self.look_at_frozenset(value, path)

    def look_at_frozenset(self, value: Any, path: Path) -> None:
        self.look_at_tuple(tuple(value), path)

    def look_at_optimizer(self, value: Any, path: Path) -> None:
        # An optimizer's state, which may be twice as large as the model, changes in updates only, and none are made.
        self.pass_over(vars(value).get("state"))
        self.look_at_space(vars(value), path)

    def look_at_cache(self, value: Any, path: Path) -> None:
        """At what ``functools.lru_cache`` or ``functools.cache`` keeps of a function."""
        if is_of_others(value.__module__):
            return
        before = value.cache_info()
        held = [value.__wrapped__]
        if before.maxsize is None and before.currsize:
            # The results are in a plain dictionary, which can be set back exactly.
            held += (one for one in gc.get_referents(value) if type(one) is dict and one is not vars(value))
        else:
            self._undo.append(partial(_clear_if_filled, value, before))
        self.look_at_tuple(held, path)

    def look_at_iterator(self, value: Any, path: Path) -> None:
        if isinstance(value, types.GeneratorType):
            self._once.append((path, partial(_place_of_generator, value), _place_of_generator(value)))
        elif hasattr(value, "_num_yielded"):  # of a DataLoader
            self._once.append((path, lambda: value._num_yielded, value._num_yielded))
        elif type(value).__module__ in ("builtins", "itertools"):
            self.look_at_tuple(_parts_of_iterator(value), path)
        elif self.is_open(type(value)):
            self.look_at_object(value, path)

    def look_at_object(self, value: Any, path: Path) -> None:
        contents = (attributes_of(value) or {}).values()
        if isinstance(value, Dataset):
            lists = (one for one in contents if isinstance(one, (list, tuple)) and len(one) <= self.DEEPEST)
            for one in itertools.chain(contents, *lists):
                if getattr(one, "nbytes", 0) > _MAX_DATA_BYTES:
                    self.pass_over(one)
        is_module = isinstance(value, nn.Module)
        if is_module or not any(type(content).__module__.partition(".")[0] in _RUNNING for content in contents):
            super().look_at_object(value, path)

    def look_at_class(self, cls: type, path: Path) -> None:
        new = [base for base in cls.__mro__ if id(base) not in self.paths and not is_of_others(base.__module__)]
        super().look_at_class(cls, path)
        for base in new:
            self.look_at_tuple(_caches_of(base), path)


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


def _is_users(base: type) -> bool:
    """Whether a class is written in Python by the user or in a package, or is a base without state such as `object`."""
    if base in (object, abc.ABC, Generic, Protocol) or base.__module__ in _DATA:
        return True
    is_python = base.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return bool(is_python and not is_of_others(base.__module__))


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


def _caches_of(cls: type) -> list[Any]:
    """The functions of a class whose results are cached, and those of its file, which its methods may call in a
    roundabout way."""
    members = (getattr(one, "__func__", None) or getattr(one, "fget", None) or one for one in vars(cls).values())
    beside = vars(sys.modules.get(cls.__module__, object)).values()
    return [one for one in (*members, *beside) if isinstance(one, functools._lru_cache_wrapper)]


def _told(path: Path) -> str:
    """A path as code writes it."""
    told = ""
    for kind, name in path:
        if kind == "name":
            told = name
        elif isinstance(name, str) and not (name.startswith("__") or kind == "module"):
            told += f".{name}" if told else name
    return told


def _clear_if_filled(function: Any, before: Any) -> None:
    """Empty a cache that has taken up results. Those that a bounded one had before cannot be told from them."""
    if function.cache_info().misses != before.misses:
        function.cache_clear()
