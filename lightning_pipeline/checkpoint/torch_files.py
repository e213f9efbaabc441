"""Loads files written by torch.save, and explains what is wrong with one that cannot be read."""

from __future__ import annotations

import errno
import os
import pickle
import re
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

import torch

ZIP_MAGIC = b"PK\x03\x04"  # of every file that torch.save has written since version 1.6

_REFUSAL = re.compile(r"(?:Unsupported global: |unsupported )GLOBAL (\S+)")
# Classes of plain values. torch refuses them as well, for instance as the factory of a defaultdict, but they are
# harmless, so messages name them only if there are no others.
_PLAIN = {f"builtins.{kind.__name__}" for kind in (bool, bytes, dict, float, frozenset, int, list, slice, str, tuple)}


class CheckpointError(RuntimeError):
    """A file is damaged, no checkpoint, or the checkpoint of another model or optimizer."""


def load_torch_file(
    path: Path, *, weights_only: bool | None, way_out: str, map_location: Any = "cpu", mmap: bool = False
) -> Any:
    """What ``torch.save`` has written to a file.

    Args:
        weights_only: as for ``torch.load``.
        way_out: a sentence for the message if the file has objects, on how to load it all the same.
        mmap: map the file into memory, so that only what is used is read; ignored for formats before torch 1.6.

    Raises:
        CheckpointError: it is damaged, not one of torch's, or has objects that ``weights_only`` refuses.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        loaded = torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mmap and is_zip)
        if is_zip:
            _check_checksums(path)
        return loaded
    except Exception as error:
        if is_of_the_system(error):
            raise with_file(error, path) from None
        raise CheckpointError(_describe(path, error, way_out)) from error


def is_of_the_system(error: BaseException) -> TypeGuard[OSError]:
    """Whether the system could not read a file; otherwise the file is damaged.

    "Invalid argument" is the file's fault: it comes of seeking to before the start, in one that is cut off.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def with_file(error: OSError, path: Path) -> OSError:
    """The same error, with the name of the file."""
    return error if error.filename is not None else OSError(error.errno, error.strerror or str(error), str(path))


def is_trusted(weights_only: bool | None) -> bool:
    """Whether torch.load would load any object with this `weights_only`; torch's environment variables count too."""

    def is_set(name: str) -> bool:
        return os.environ.get(name, "").lower() in ("1", "y", "yes", "true")

    if is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return False
    return weights_only is False or (weights_only is None and is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"))


def reason_of(error: BaseException) -> str:
    """An error in one line, without torch's advice to load whatever cannot be read with weights_only=False."""
    text = str(error)
    _, is_from_torch, inner = text.partition("WeightsUnpickler error: ")
    line = (inner if is_from_torch else text).strip().partition("\n")[0].strip()[:500]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def refused_classes(error: BaseException, path: Path | None = None) -> list[str]:
    """The classes for which torch has refused a file; [] if the error has another reason.

    Args:
        path: the file, which tells all of them; without it, the error tells the first.
    """
    first = _REFUSAL.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if first is None:
        return []
    names: set[str] = set()
    if path is not None:
        with suppress(Exception):  # of a file in an old format, or damaged
            names = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    return sorted(names - _PLAIN) or sorted(names) or [first[1]]


def few(names: Sequence[str]) -> str:
    """The first three names, and how many more there are. Overlong names, as in damaged files, are shortened."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name if len(name) < 200 else f"{name[:90]}...{name[-90:]}" for name in names[:3]) + more


def _check_checksums(path: Path) -> None:
    """Compare the checksums of the records that are no tensors: a changed bit is another learning rate, step or name.

    torch does not. If torch.serialization.set_crc32_options has turned checksums off, no record has the right one, and
    none counts.
    """
    errors: list[zipfile.BadZipFile | None] = []
    with zipfile.ZipFile(path) as records:
        for record in records.infolist():
            if "/data/" not in record.filename:
                try:
                    records.read(record)
                    errors.append(None)
                except zipfile.BadZipFile as error:
                    errors.append(error)
    damaged = next(filter(None, errors), None)
    if damaged is not None and None in errors:
        raise damaged


def _describe(path: Path, error: Exception, way_out: str) -> str:
    """Why torch could not load a file."""
    if names := refused_classes(error, path):
        return (
            f"{path} holds objects that torch does not load from any file ({few(names)}), and these can run any code "
            f"when they are loaded. {way_out}"
        )
    with path.open("rb") as file:
        start = file.read(len(ZIP_MAGIC))
    if start != ZIP_MAGIC:
        found = f"it starts with {start!r}" if start else "it is empty"
        return f"{path} is no checkpoint: {found}, and torch.save's files start with {ZIP_MAGIC!r}"
    has_end = True
    with suppress(zipfile.BadZipFile):  # its end is there, and damaged
        has_end = zipfile.is_zipfile(path)
    if not has_end:
        return (
            f"{path} is cut off after {path.stat().st_size:,} bytes, as by a copy that did not end: copy it again, or "
            "take another checkpoint"
        )
    lacks_code = isinstance(error, (ImportError, AttributeError))  # of an object in the file
    way = "" if lacks_code else ". It is damaged, or none of torch's: take another one"
    return f"{path} cannot be read as a checkpoint: {reason_of(error)}{way}"
