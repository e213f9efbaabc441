"""Checkpoint files that are complete or absent, and of which a rank reads only its part."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
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
METADATA_FILE = ".metadata"
"""What torch.distributed.checkpoint's folders have."""
_LOCK = "lock"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

# -- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """A place for a file or folder that takes the name `path` at the end of the block.

    Until then, and after an error in the block, `path` is what it was; a process that is killed at any moment leaves
    the old or the new under the name, whole. The place is in a draft folder beside `path`, which the process locks:
    the system ends the lock with the process, so the next writer can tell what a killed one has left, and removes it.
    """
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    draft, lock = _make_draft(path.parent)
    written = draft / "content"
    try:
        yield written
        _publish(written, path)
    finally:
        lock.close()
        with suppress(OSError):  # other ranks may still write to it; the next save removes what stays
            remove(written)
            shutil.rmtree(draft)


@contextmanager
def written_to_disk(path: Path) -> Generator[IO[bytes], None, None]:
    """A new file, of which all is on the disk at the end of the block."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(folder: Path) -> None:
    """Remove the drafts of processes that are gone. Where the file system has no locks, nothing is removed."""
    for leftover in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError), (leftover / _LOCK).open("r+b") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_draft(folder: Path) -> tuple[Path, IO[bytes]]:
    while True:
        draft = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=SUFFIX, dir=folder))
        lock = (draft / _LOCK).open("wb")
        if _lock(lock) and os.fstat(lock.fileno()).st_nlink > 0:
            return draft, lock
        lock.close()  # another save took it for a leftover, between its creation and the lock


def _lock(file: IO[bytes]) -> bool:
    """Whether the file is locked now, or the file system has no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _publish(written: Path, path: Path) -> None:
    """Give what was written its name. What had the name before goes, or is left in the draft."""
    if written.is_dir():
        _sync_folder(written)
    if os.path.lexists(path) and (written.is_dir() or path.is_dir()):  # which a rename does not replace
        _swap(written, path)
    else:
        written.replace(path)
    _sync_folder(path.parent)


def _swap(written: Path, path: Path) -> None:
    """At once where the system and the file system can; elsewhere there is an instant without either."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None or renameat2(_AT_FDCWD, bytes(written), _AT_FDCWD, bytes(path), _RENAME_EXCHANGE) != 0:
        path.rename(written.with_name("replaced"))
        written.rename(path)


def _sync_folder(folder: Path) -> None:
    """Let a rename in it survive a power cut as well. Not every file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- plain files ------------------------------------------------------------------------------------------------------

COPIED_BY_LOADING = ("state_dict", "optimizer_states", "current_model_state", "averaging_state")
"""Entries of a checkpoint whose tensors are copied on loading; the last two are Lightning's WeightAveraging's."""

TRUST_IT = (
    "If you trust the file, give trainer.fit weights_only=False (and trainer.test, likewise), or allow the classes "
    "with torch.serialization.add_safe_globals([...]). Files to come need neither if hyperparameters and callbacks' "
    "states are builtins and tensors"
)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's ``.ckpt`` files on local disks; Lightning itself reads and writes other paths.

    A file is written beside the one that it replaces, straight from the tensors, and takes its name once it is on the
    disk: whenever a process is killed, the file is the old one or the new one. Reading maps the file into memory, so
    that what nobody copies is not read.

    Args:
        weights_only: the default for loads. None is torch's default, True: a file may hold tensors, builtins and
            classes that ``torch.serialization.add_safe_globals`` allows. False takes anything, from a file that you
            trust.
    """

    def __init__(self, *, weights_only: bool | None = None) -> None:
        super().__init__()
        self.weights_only = weights_only

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint, and replace the file of this name, if there is one.

        Raises:
            OSError: the system's, such as a full disk; the message names the sizes. The old file stays.
        """
        local = _local(path)
        if storage_options is not None or local is None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        try:
            with replacing(local) as written, written_to_disk(written) as file:
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
            FileNotFoundError: the file does not exist.
            CheckpointError: it is damaged or no checkpoint, or holds objects that ``weights_only`` refuses.
        """
        weights_only = self.weights_only if weights_only is None else weights_only
        local = _local(path)
        if local is None:
            return super().load_checkpoint(path, map_location, weights_only)
        if not local.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        if not local.is_file():
            raise CheckpointError(f"{local} is a folder, not a checkpoint file")
        options = {"weights_only": weights_only, "map_location": map_location, "mmap": True}
        checkpoint = load_torch_file(local, way_out=TRUST_IT, **options)
        if isinstance(checkpoint, dict):
            read_into_memory({key: value for key, value in checkpoint.items() if key not in COPIED_BY_LOADING})
        return checkpoint


def tensors_in(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in nested dicts, lists and tuples, each with the keys and indices that lead to it."""
    if isinstance(content, torch.Tensor):
        yield path, content
    elif isinstance(content, (dict, list, tuple)):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from tensors_in(value, (*path, key))


def entry_at(content: Any, path: tuple[Any, ...]) -> Any:
    """What is at the end of a path of keys and indices."""
    for key in path:
        content = content[key]
    return content


def read_into_memory(tree: Any) -> None:
    """Give CPU tensors in nested dicts, lists and tuples memory of their own, instead of a file's mapped pages.

    A tensor that stays mapped keeps the disk space of a file that was replaced since, and on a network file system
    cannot be read any more.
    """
    for _, tensor in tensors_in(tree):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def _local(path: str | Path) -> Path | None:
    """The path on a local file system, None on any other."""
    file_system, local = url_to_fs(str(path))
    return Path(local) if isinstance(file_system, LocalFileSystem) else None


def system_error(error: BaseException | None) -> OSError | None:
    """The system's error that caused one of torch's, which says only that a position in the file is unexpected."""
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


def is_relative(name: str) -> bool:
    """Whether a name can be that of a file below the folder that it is relative to, on any system, links aside."""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    is_name = bool(paths[0].parts) and name.isprintable() and all(len(part) < 256 for part in paths[0].parts)
    return is_name and len(name) < 4096 and not any(path.anchor or ".." in path.parts for path in paths)
