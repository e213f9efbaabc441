"""Reads the metadata of torch.distributed.checkpoint folders without unpickling arbitrary objects.

torch writes it to a file `.metadata` by pickle, and reads it by pickle, whatever classes it names. It consists of a few
dataclasses, so nothing else is made here: names, calls and states of anything else are refused, and the result is
checked for what torch relies on afterwards. Read in torch 2.10 to 2.13; files of 2.0 to 2.2 name two other classes,
which are known too.
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from .files import METADATA_FILE
from .torch_files import CheckpointError, few

MAX_BYTES = 2**28
"""Of the file: about a million tensors."""
MAX_DIMENSIONS = 64
"""Of a tensor: torch's own bound."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (module, name): getattr(importlib.import_module(module), name)
        for module, names in (
            (_METADATA, "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata"),
            (_METADATA, "ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING"),
            (_FILES, "_StorageInfo"),
            (_OLD, "TensorProperties MEM_FORMAT_ENCODING"),
        )
        for name in names.split()
    },
    ("torch", "Size"): torch.Size,
    # Where it was written: of any system, and in Python 3.13 of another module.
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): PureWindowsPath for module in ("pathlib", "pathlib._local")},
}
_StorageInfo = _CLASSES[_FILES, "_StorageInfo"]
_PROPERTIES = (_CLASSES[_METADATA, "TensorProperties"], _CLASSES[_OLD, "TensorProperties"])
# Whatever protocols 2 to 5 need to make such objects, and for numbers, texts, lists, dicts and tuples.
_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
)


def read_metadata(folder: Path, way_out: str) -> Metadata:
    """The metadata of a folder that may come from anybody.

    Args:
        way_out: a sentence for the message if it names another class, on how to load it all the same.

    Raises:
        CheckpointError: the file names other classes than metadata has, or is damaged. Names the file.
    """
    path = folder / METADATA_FILE
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise CheckpointError(f"{path} is no metadata of a checkpoint: it has more than {MAX_BYTES:,} bytes")
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        fault = _fault_of(metadata)
    except _OtherClassError as error:
        raise CheckpointError(
            f"{path} names {few([str(error)])}, which is none of the classes of torch.distributed.checkpoint's "
            f"metadata: the file is damaged, or can run any code when it is loaded. {way_out}"
        ) from None
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        raise CheckpointError(f"{path} is damaged: {fault[:500]}")
    return metadata


class _OtherClassError(Exception):
    """Metadata name another class than their own; the text is its name."""


class _MetadataUnpickler(pickle._Unpickler):
    """Understands metadata and nothing else.

    It is the version in Python, whose opcodes can be replaced. Those that metadata do not need are left out. In the
    others, BUILD would set attributes of any object, classes and functions too; and the memo of the version in C takes
    as much memory as a number in the file says.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise _OtherClassError(f"{module}.{name}")

    def load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) in _PROPERTIES:
            made.__setstate__(state)
        elif is_dataclass(type(made)) and type(state) is dict:
            vars(made).update(state)
        else:
            raise pickle.UnpicklingError(f"a {type(made).__name__} has no state")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(self.stack[-1], items)

    @staticmethod
    def _set(target: Any, items: list[Any]) -> None:
        if type(target) is not dict:
            raise pickle.UnpicklingError(f"items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            is_index = type(key) is MetadataIndex and type(key.fqn) is str
            # Hashing nested tuples could take for ever.
            if type(key) is not str and not (is_index and (key.offset is None or type(key.offset) is torch.Size)):
                raise pickle.UnpicklingError(f"a key that is a {type(key).__name__}")
            target[key] = value

    dispatch: ClassVar[Any] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in (getattr(pickle, name) for name in _OPCODES)},
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _layout(name: str) -> torch.layout:
    found = vars(torch).get(str(name).removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise ValueError(f"{name!r} is no layout")
    return found


def _fault_of(metadata: Any) -> str:
    """What torch would not have written: other types, or chunks that do not make up their tensor; "" for nothing."""
    if type(metadata) is not Metadata:
        return f"it holds a {type(metadata).__name__}"
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    if type(entries) is not dict or type(places) is not dict:
        return "it has no entries"
    for index, place in places.items():
        if type(index) is not MetadataIndex or (fault := _fault_of_place(place)):
            return f"{index} has no place in a file ({fault})"
    for name, entry in entries.items():
        if type(name) is not str or type(entry) not in (BytesStorageMetadata, TensorStorageMetadata):
            return f"{name} is a {type(entry).__name__}"
        if type(entry) is TensorStorageMetadata and (fault := _fault_of_tensor(name, entry, places)):
            return f"{name} {fault}"
    return ""


def _fault_of_place(place: Any) -> str:
    if type(place) is not _StorageInfo:
        return f"a {type(place).__name__}"
    if type(place.relative_path) is not str:
        return "without a name"
    if any(type(number) is not int or number < 0 for number in (place.offset, place.length)):
        return "without a range of bytes"
    forms = place.transform_descriptors or []
    if type(forms) not in (list, tuple) or any(type(text) is not str for text in forms):
        return "in an unknown form"
    return ""


def _fault_of_tensor(name: str, tensor: TensorStorageMetadata, places: dict[MetadataIndex, Any]) -> str:
    dtype, size = tensor.properties.dtype, tensor.size
    if not isinstance(dtype, torch.dtype) or not _is_shape(size):
        return "has no shape and dtype of a tensor"
    covered = 0
    for chunk in tensor.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        if not (_is_shape(offsets) and _is_shape(sizes) and len(offsets) == len(sizes) == len(size)):
            return "has a chunk without a shape of its own"
        if any(start + n > whole for start, n, whole in zip(offsets, sizes, size, strict=True)):
            return f"has the shape {tuple(size)} and a chunk of {tuple(sizes)} at {tuple(offsets)}"
        place = places.get(MetadataIndex(name, offsets))
        if place is None:
            return f"has a chunk at {tuple(offsets)} that is in no file"
        num_elements = math.prod(sizes)
        if not place.transform_descriptors and num_elements * dtype.itemsize > place.length:
            return f"has a chunk of {num_elements * dtype.itemsize:,} bytes in {place.length:,}"
        covered += num_elements
    if covered != math.prod(size):
        return f"has {math.prod(size):,} elements and chunks of {covered:,}"
    return ""


def _is_shape(value: Any) -> bool:
    return type(value) is torch.Size and len(value) <= MAX_DIMENSIONS and all(number >= 0 for number in value)
