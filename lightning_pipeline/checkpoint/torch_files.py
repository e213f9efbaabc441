"""Loads files written by torch.save, and explains what is wrong with one that cannot be read."""

from __future__ import annotations

import errno
import os
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch

ZIP_MAGIC = b"PK\x03\x04"  # of every file that torch.save has written since version 1.6

_REFUSAL = re.compile(r"(?:Unsupported global: |unsupported )GLOBAL (\S+)")
# Classes of plain values. A file that has one by itself, as the factory of a defaultdict, is refused as well, but not
# for what it could do.
_PLAIN = {f"builtins.{kind.__name__}" for kind in (bool, bytes, dict, float, frozenset, int, list, slice, str, tuple)}


class CheckpointError(RuntimeError):
    """A checkpoint is broken, is none, or is one of another model or optimizer."""


def load_torch_file(
    path: Path, *, weights_only: bool | None, way_out: str, map_location: Any = "cpu", mmap: bool = False
) -> Any:
    """What ``torch.save`` has written to a file.

    Args:
        weights_only: as for ``torch.load``.
        way_out: a sentence for the message if the file has objects, on how to load it all the same.
        mmap: map the file into memory, so that what nobody uses is not read; not with formats before torch 1.6.

    Raises:
        OSError: the system's, which names the file.
        CheckpointError: it is damaged, no such file, or has objects that ``weights_only`` refuses.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        loaded = torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mmap and is_zip)
        if is_zip:
            _check_values(path)
        return loaded
    except Exception as error:
        if is_of_the_system(error):
            raise with_file(error, path) from None
        raise CheckpointError(_describe(path, error, way_out)) from error


def is_of_the_system(error: BaseException) -> TypeGuard[OSError]:
    """Whether the system could not read a file; else it is the file that is wrong.

    An "invalid argument" is the file's fault: it comes of looking for a place before the beginning of one that is cut.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def with_file(error: OSError, path: Path) -> OSError:
    """The same error, with the name of a file if it has none."""
    return error if error.filename is not None else OSError(error.errno, error.strerror or str(error), str(path))


def is_trusted(weights_only: bool | None) -> bool:
    """Whether torch.load would take any object with this `weights_only`: the environment may have a say as well."""

    def is_set(name: str) -> bool:
        return os.environ.get(name, "").lower() in ("1", "y", "yes", "true")

    if is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return False
    return weights_only is False or (weights_only is None and is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"))


def reason_of(error: BaseException) -> str:
    """An error in a line, without torch's advice, which is to load with weights_only=False whatever cannot be read."""
    text = str(error)
    _, is_from_torch, inner = text.partition("WeightsUnpickler error: ")
    line = (inner if is_from_torch else text).strip().partition("\n")[0].strip()[:500]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def refused_classes(error: BaseException, path: Path | None = None) -> list[str]:
    """The classes for which torch has refused a file; [] where it is another thing that is wrong.

    Args:
        path: the file, which tells all of them; else the error tells the first.
    """
    first = _REFUSAL.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if first is None:
        return []
    names = set()
    if path is not None:
        try:
            names = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        except Exception:  # it cannot be gone through: of an old format, or damaged as well
            names = set()
    return sorted(names - _PLAIN) or sorted(names) or [first[1]]


def few(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are. Those that no program gives are shortened."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name if len(name) < 200 else f"{name[:90]}...{name[-90:]}" for name in names[:most]) + more


def _check_values(path: Path) -> None:
    """Compare the checksum of what a file has beside its tensors. torch does not, and a changed bit there is another
    learning rate, step or name.

    Where torch.serialization.set_crc32_options has turned checksums off, no record's is right, and none counts.

    Raises:
        zipfile.BadZipFile: there is another one.
    """
    damaged, is_checked = "", False
    with zipfile.ZipFile(path) as records:
        for record in records.infolist():
            if "/data/" in record.filename:
                continue
            try:
                records.read(record)
                is_checked = True
            except zipfile.BadZipFile as error:
                damaged = str(error)
    if damaged and is_checked:
        raise zipfile.BadZipFile(damaged)


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
    if not _has_its_end(path):
        return (
            f"{path} is cut off after {path.stat().st_size:,} bytes, as by a copy that did not end: copy it again, or "
            "take another checkpoint"
        )
    needs_code = isinstance(error, (ImportError, AttributeError))  # of an object that it may have
    way = "" if needs_code else ". It is damaged, or none of torch's: take another one"
    return f"{path} cannot be read as a checkpoint: {reason_of(error)}{way}"


def _has_its_end(path: Path) -> bool:
    """Whether a zip file has the end, which lists what is in it."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it has one that is damaged
        return True
