"""Files and folders that are there whole or not at all, whenever the process that writes them is killed."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
import zlib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # not on Windows: there, what a killed process left is not cleaned up
    fcntl = None  # type: ignore[assignment]

# Not the target's own name with an ending: Lightning finds "last" by the name's start and ".ckpt", and takes any name
# with "hpc_ckpt_" in it for a checkpoint, whose number is all of its digits.
PREFIX, SUFFIX = ".checkpoint-", ".partial"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replacing(path: Path) -> Generator[IO[bytes], None, None]:
    """A new file that takes the place of `path` at the end of the block, whole and on the disk.

    Until then, and after an error in the block, `path` is what it was. What is written lies in the same folder, under
    a name of its own; what killed processes left of theirs is removed first.

    Raises:
        OSError: the system's, if the file cannot be written.
    """
    remove_leftovers(path.parent)
    file = _create(path.parent)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)  # before the file is closed, which ends its lock
    except BaseException:
        with suppress(OSError):
            os.unlink(file.name)
        raise
    sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of processes that are gone.

    A process that writes holds a lock on its file, which the system takes from a process that ends in any way. Where
    the file system has no locks, nothing is removed.
    """
    for leftover in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError), leftover.open("r+b") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()


def sync_folder(folder: Path) -> None:
    """Let a rename in it survive a power cut as well. Not every file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _create(folder: Path) -> IO[bytes]:
    """A new file with an unused name, open and locked."""
    while True:
        file = open(folder / f"{PREFIX}{uuid.uuid4().hex}{SUFFIX}", "xb")  # noqa: SIM115 - the caller closes it
        if _lock(file) and os.fstat(file.fileno()).st_nlink > 0:
            return file
        file.close()  # another save took it for a leftover, between its creation and the lock


def _lock(file: IO[bytes]) -> bool:
    """Whether the file is locked now, or cannot be locked by anybody."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


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
