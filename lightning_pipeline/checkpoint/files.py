"""Checkpoint files that are complete or absent, and of which a rank reads only its part."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
import zlib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from .._lightning import TorchCheckpointIO
from .torch_files import CheckpointError, load_torch_file

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


COPIED_BY_LOADING = ("state_dict", "optimizer_states", "current_model_state", "averaging_state")
"""Entries of a checkpoint whose tensors are copied on loading; the last two are Lightning's WeightAveraging's."""

TRUST_IT = (
    "If you trust the file, give trainer.fit weights_only=False (and trainer.test, likewise), or allow the classes "
    "with torch.serialization.add_safe_globals([...]). Files to come need neither if hyperparameters and callbacks' "
    "states are builtins and tensors"
)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's ``.ckpt`` files, written and read with care; what is not on a local disk goes Lightning's way.

    A file is written beside the one that it replaces, straight from the tensors, and takes its name once it is on the
    disk: whenever a process is killed, the file is the old one or the new one. Reading maps the file into memory, so
    that what nobody copies is not read.

    Args:
        weights_only: what holds where a load does not say. None is torch's default, True: a file may hold tensors,
            builtins and classes that ``torch.serialization.add_safe_globals`` allows. False takes anything, from a file
            that you trust.
    """

    def __init__(self, *, weights_only: bool | None = None) -> None:
        super().__init__()
        self.weights_only = weights_only

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint, in place of the file that may be there.

        Raises:
            OSError: the system's, such as a full disk; the message names the sizes, and the old file is still there.
        """
        local = _local(path)
        if storage_options is not None or local is None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(local) as file:
                self.write(checkpoint, file)
        except (OSError, RuntimeError) as error:
            cause = system_error(error)
            if cause is None:
                raise
            raise OSError(cause.errno, _describe_failure(cause, checkpoint, local)) from error

    def write(self, checkpoint: dict[str, Any], file: IO[bytes]) -> None:
        """Write a checkpoint to an open file, one tensor after the other."""
        torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint. Tensors of its weights and optimizers stay in the file until they are copied.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: it is broken or no checkpoint, or holds objects that are not loaded from any file.
        """
        weights_only = self.weights_only if weights_only is None else weights_only
        local = _local(path)
        if local is None:
            return super().load_checkpoint(path, map_location, weights_only)
        if not local.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        return _read(local, map_location, weights_only)


def read_into_memory(tree: Any) -> None:
    """Give CPU tensors in nested dicts, lists and tuples memory of their own, in place of a file's mapped pages.

    A tensor that stays mapped keeps the disk space of a file that was replaced since, and on a network file system
    cannot be read any more.
    """
    if isinstance(tree, torch.Tensor):
        if tree.device.type == "cpu":
            tree.data = tree.data.clone()
    elif isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            read_into_memory(value)


def _local(path: str | Path) -> Path | None:
    """The path on a local file system, None on any other."""
    file_system, local = url_to_fs(str(path))
    return Path(local) if isinstance(file_system, LocalFileSystem) else None


def _read(path: Path, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is a folder, not a checkpoint file")
    checkpoint = load_torch_file(
        path, weights_only=weights_only, way_out=TRUST_IT, map_location=map_location, mmap=True
    )
    if isinstance(checkpoint, dict):
        read_into_memory({key: value for key, value in checkpoint.items() if key not in COPIED_BY_LOADING})
    return checkpoint


def system_error(error: BaseException | None) -> OSError | None:
    """The system's error behind torch's own, which says only that a position in the file is unexpected."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _describe_failure(error: OSError, checkpoint: dict[str, Any], path: Path) -> str:
    """Why the system could not write a file."""
    message = f"cannot write checkpoint {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        counter = _Counter()
        torch.save(checkpoint, counter)  # type: ignore[arg-type]
        free = shutil.disk_usage(path.parent).free
        message += f" (it needs {counter.size:,} bytes, beside the file that it replaces, and {free:,} are free)"
    return message + ("; the file that was there is still whole" if path.is_file() else "")


class _Counter:
    """A file that only counts its bytes."""

    size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        pass
