"""What the first rank's code has changed of Python objects, as it is sent, and how another rank changes its own alike.

A change is pickled by itself, so that one that cannot be is left out: the kind of change, the path of the object, a
key, and the value. In the places of objects that were there before are their paths; new ones that several changes lead
to are one object there, too.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy
from torch import Tensor, nn

from lightning_pipeline.partition.tree import REDUCTIONS
from lightning_pipeline.recording.object_state import PLAIN, SETTERS, Path


def pickled_changes(
    changes: Sequence[tuple[str, Path, Any, Any]], paths: Mapping[int, Path], left: list[int]
) -> list[bytes | None]:
    """Pickle changes for `apply`; None for those that cannot be. See `_Pickler`."""
    file = io.BytesIO()
    pickler = _Pickler(file, paths, left)
    found: list[bytes | None] = []
    for change in changes:
        file.seek(0)
        file.truncate()
        try:
            pickler.dump(change)
            found.append(file.getvalue())
        except Exception:  # of any kind, as objects pickle themselves as they like
            pickler.clear_memo()
            found.append(None)
    return found


class _Pickler(pickle.Pickler):
    """Pickles changes.

    Args:
        paths: of the objects that were there before, by their ids.
        left: the bytes of tensors and arrays that may still be sent.
    """

    def __init__(self, file: io.BytesIO, paths: Mapping[int, Path], left: list[int]) -> None:
        super().__init__(file, protocol=3)  # which numbers what may be met again, so that others may leave out a change
        self.dispatch_table = REDUCTIONS
        self._paths, self._left = paths, left

    def persistent_id(self, value: Any) -> Path | None:
        if type(value) in PLAIN or isinstance(value, type):
            return None
        if (path := self._paths.get(id(value))) is not None:
            return path
        is_data = isinstance(value, (Tensor, numpy.ndarray))
        if is_data and self._left[0] >= 0:
            self._left[0] -= value.nbytes
        is_odd = isinstance(value, Tensor) and (type(value) is not Tensor or value.is_meta or value.requires_grad)
        if is_odd or (is_data and self._left[0] < 0) or isinstance(value, nn.Module):
            raise pickle.PicklingError("it stays on the first rank")
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, changes: io.BytesIO, loader: Any) -> None:
        super().__init__(changes)
        self._loader = loader

    def persistent_load(self, path: Path) -> Any:
        return _found(path, self._loader)


def apply(changes: list[bytes], loader: Any) -> None:
    """On another rank: change what the first rank's code has changed."""
    # All are found before any is changed: paths lead through what was there before.
    found = []
    file = io.BytesIO()
    unpickler = _Unpickler(file, loader)
    for change in changes:
        place = file.tell()
        file.write(change)
        file.seek(place)
        # Within what only the first rank has, such as a file.
        with suppress(LookupError, AttributeError, TypeError, pickle.UnpicklingError):
            kind, path, key, value = unpickler.load()
            found.append((kind, _found(path, loader), key, value))
        file.seek(0, io.SEEK_END)
    for kind, holder, key, value in found:
        SETTERS[kind](holder, key, value)


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
            found = sys.modules[name]
    return found
