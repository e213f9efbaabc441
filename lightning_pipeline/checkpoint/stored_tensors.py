"""Tensors of a checkpoint folder that are read lazily."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_pipeline import _torch
from lightning_pipeline.schedules.validation import shown

from .files import TRUST_IT
from .folder_metadata import METADATA_FILE, read_metadata
from .torch_files import (
    CheckpointError,
    few,
    is_of_the_system,
    is_trusted,
    reason_of,
    refused_classes,
    with_file,
)


class ShardFiles:
    """The tensors of a folder in torch.distributed.checkpoint's format.

    Args:
        path: the folder.
        weights_only: as for ``torch.load``. Unless it is False, nothing in the folder can run code, and no file outside
            of it is read; if its `.metadata` is a link, as in Hugging Face's cache, files beside its target may be.
        way_out: a sentence for the message if the folder is refused, on how to load it all the same.

    Raises:
        OSError: the metadata cannot be read.
        CheckpointError: it is damaged or names other classes or files, or files are missing, or shorter than when they
            were written.
    """

    def __init__(self, path: Path, weights_only: bool | None = None, *, way_out: str = TRUST_IT) -> None:
        self.path = path
        self._metadata = _trusted_metadata(path) if is_trusted(weights_only) else read_metadata(path, way_out)
        ends: dict[str, int] = {}
        for stored in (self._metadata.storage_data or {}).values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        if not is_trusted(weights_only):
            self._check_names(ends, way_out)
        for name, end in ends.items():
            size = (path / name).stat().st_size if (path / name).is_file() else None
            if size is None or size < end:
                found = "is missing" if size is None else f"has {size} of {end} bytes"
                raise CheckpointError(f"the checkpoint {path} is not whole: its file {name} {found}")

    def names(self) -> list[str]:
        """The names of all tensors, in the order of the metadata."""
        entries = self._metadata.state_dict_metadata
        return [name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]

    def tensor(self, name: str) -> StoredTensor:
        """The tensor of this name, not read yet.

        Raises:
            CheckpointError: the folder has none.
        """
        found = self._metadata.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"the checkpoint {self.path} has no tensor {few([name])}")
        stored = torch.empty(found.size, dtype=found.properties.dtype, device="meta").as_subclass(StoredTensor)
        stored.files, stored.name_in_files = self, name
        return stored

    def read(self, name: str, into: Tensor) -> Tensor:
        """Copy a tensor from its files into another; into a DTensor, this rank's slice.

        Raises:
            OSError: the system's.
            CheckpointError: its files are damaged.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = _Reader(self.path, self._metadata)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({name: into.detach()}, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # torch's, a BaseException
            reason: BaseException = next((cause for cause, _ in error.failures.values()), error)
            if is_of_the_system(reason):
                raise with_file(reason, self.path) from None
            if not isinstance(reason, (Exception, CheckpointException)):  # such as an interrupt
                raise reason from None
            found = f"holds {few(names)} in its place" if (names := refused_classes(reason)) else reason_of(reason)
            places = self._metadata.storage_data.items()
            files = sorted({place.relative_path for index, place in places if index.fqn == name})
            raise CheckpointError(
                f"the checkpoint {self.path} cannot give {few([name])}, from {few(files)}: {found}. "
                f"It is damaged: take another one"
            ) from reason
        return into

    def _check_names(self, names: Iterable[str], way_out: str) -> None:
        roots = {self.path.resolve(), (self.path / METADATA_FILE).resolve().parent}
        for name in names:
            try:
                found = (self.path / name).resolve() if is_relative(name) else None
            except (OSError, RuntimeError):  # a ring of links
                found = None
            if found is None or not any(found.is_relative_to(root) for root in roots):
                raise CheckpointError(
                    f"the checkpoint {self.path} names the file {shown(name)}, which is not in it: its {METADATA_FILE} "
                    f"is damaged, or made to read other files. {way_out}"
                )


def is_relative(name: str) -> bool:
    """Whether a name can be that of a file below the folder that it is relative to, on any system, links aside."""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    is_name = bool(paths[0].parts) and name.isprintable() and all(len(part) < 256 for part in paths[0].parts)
    return is_name and len(name) < 4096 and not any(path.anchor or ".." in path.parts for path in paths)


def _trusted_metadata(path: Path) -> Metadata:
    """As torch reads it, which may run code."""
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path / METADATA_FILE} cannot be read: {reason_of(error)}") from error


class _Reader(dcp.FileSystemReader):
    """Takes the metadata as it was read and checked before, however many tensors follow."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._read_before = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._read_before


class StoredTensor(Tensor):
    """A tensor in files, which is read when it is used.

    Lightning hands a loaded checkpoint to hooks of the module and of callbacks, which may look at a tensor's shape,
    give it another key, or compute with it, before the module and the optimizers load their parts. So a checkpoint in
    shards looks like any other: shapes are known, copying to a tensor reads straight into it, and any other operation
    first reads the whole tensor to the CPU. What is never used is never read.
    """

    files: ShardFiles
    name_in_files: str

    def read(self) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.files.read(self.name_in_files, torch.empty(self.shape, dtype=self.dtype))

    def read_like(self, sharded: Tensor) -> Tensor:
        """This rank's slice, divided as `sharded` is."""
        return self.files.read(self.name_in_files, torch.empty_like(sharded, dtype=self.dtype, requires_grad=False))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBING:
            with _torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _IS_META:
            return False
        if func is Tensor.copy_ and not isinstance(args[0], StoredTensor) and args[0].shape == args[1].shape:
            target, stored = args[:2]
            if not target.is_meta:
                stored.files.read(stored.name_in_files, target)
            return target
        read = _torch.tree_map_only(StoredTensor, StoredTensor.read, [args, kwargs])
        return func(*read[0], **read[1])


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DESCRIBING = (
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
)
