"""`type(tensor)` in the user's code: the class that the tensor has in one process.

Python answers `type(x)` without asking the object, and for a tensor that another rank holds it answers `Placeholder`.
So where the user's modules of Python call `type`, the name means a class that answers as in one process::

    model.py:  if type(out) is torch.Tensor: ...      vars(model)["type"], for the time of a run, before the builtin
"""

from __future__ import annotations

import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline._names import PACKAGES
from lightning_pipeline.partition.kept_parameters import KeptParameter, KeptPart
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.placeholder import Placeholder

_OURS = (Placeholder, KeptParameter, KeptPart, DTensor, _torch.FakeTensor)
"""What may stand for a tensor: another rank's, one that was kept, slices, and what measures where to cut."""


class _TypeMeta(type):
    """What `told_type` is asked, which has to be answered as `type` does."""

    def __new__(mcs, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        if bases[0] is type:
            return super().__new__(mcs, name, bases, names)
        # A metaclass of the user's, which is to derive from `type` itself.
        return type(name, tuple(type if base is told_type else base for base in bases), names)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        (value,) = args
        kind = type(value)
        if kind in _OURS:
            return _class_in_one_process(value)
        if issubclass(kind, FSDPModule):  # the class that FSDP has made of a module's own
            return next(base for base in kind.__mro__[1:] if base is not FSDPModule)
        return cls if kind is type else kind

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)

    def __eq__(cls, other: Any) -> bool:
        return other is cls or other is type

    def __hash__(cls) -> int:
        return hash(type)

    def __repr__(cls) -> str:
        return repr(type)


class told_type(type, metaclass=_TypeMeta):
    """Stands for `type` in the user's modules of Python."""

    def __class_getitem__(cls, item: Any) -> Any:
        return type[item]


def _class_in_one_process(tensor: Tensor) -> type:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter
    return DTensor if isinstance(tensor, DTensor) else Tensor


@contextmanager
def types_told() -> Iterator[None]:
    """While entered, `type` of a tensor is as in one process: in modules of Python that have been imported, and are
    not torch's, Lightning's or Python's own.
    """
    with overridden() as override:
        names = [name for name in sys.modules if name.partition(".")[0] not in _NEVER]  # there are thousands
        for module in map(sys.modules.get, names):
            if type(module) is ModuleType and "type" not in vars(module) and _is_users(module) and _uses_type(module):
                override(module, "type", told_type)
        yield


_LIBRARIES = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(*site.getsitepackages(), site.getusersitepackages()),
)
_NEVER = frozenset(("torch", "torchmetrics", "numpy", *PACKAGES, __name__.partition(".")[0]))
_OF_TORCH = ("torch", "Tensor", "nn")
"""Names by which a library's module shows that it knows of tensors."""


def _is_users(module: ModuleType) -> bool:
    """Whether this is the user's code, or that of a library for torch."""
    path = getattr(module, "__file__", None)
    if module.__name__.partition(".")[0] in _NEVER:  # it goes by another name
        return False
    is_installed = path is None or path.startswith(_LIBRARIES)
    return module.__name__ == "__main__" or not is_installed or not vars(module).keys().isdisjoint(_OF_TORCH)


_USE = re.compile(rb"(?<![.\w])type\s*[(,)]")


def _uses_type(module: ModuleType) -> bool:
    """Whether the source calls `type`, or passes it on; true where there is none, as in a notebook."""
    path = getattr(module, "__file__", None)
    return path is None or _has_use(path)


@cache
def _has_use(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return _USE.search(file.read()) is not None
    except OSError:
        return True
