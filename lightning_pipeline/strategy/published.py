"""Files and folders that appear under their name in one step, when they are complete."""

from __future__ import annotations

import ctypes
import os
import shutil
import zlib
from pathlib import Path

from lightning_pipeline.strategy.atomic_file import sync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def unfinished(path: Path) -> Path:
    """Where to write what is to be at `path`: beside it, under a name that nothing takes for a checkpoint.

    It is the same for the same path, so that the next attempt finds what a killed one has left.
    """
    return path.with_name(f".unfinished-{zlib.crc32(path.name.encode()):08x}")


def publish(path: Path) -> None:
    """Give what is at `unfinished(path)` its name, and remove what had the name before.

    A process killed at any moment leaves the one or the other whole under the name. That takes a swap, as a folder
    cannot be renamed over another one; where the system or the file system has none, there is an instant between two
    renames.
    """
    written = unfinished(path)
    if written.is_dir():  # whoever wrote a file has synchronised it
        sync_folder(written)
    if os.path.lexists(path):
        _swap(written, path)
        remove(written)
    else:
        written.rename(path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _swap(one: Path, other: Path) -> None:
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None or renameat2(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE) != 0:
        aside = one.with_name(f"{one.name}-replaced")
        remove(aside)
        other.rename(aside)
        one.rename(other)
        aside.rename(one)
