"""The shards of a checkpoint folder, which torch.distributed.checkpoint reads and writes.

Imported on first use: torch.distributed.checkpoint takes 0.1 s to import.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_pipeline.schedules.validation import shown

from .files import METADATA_FILE, TRUST_IT, is_relative, system_error
from .folder_metadata import read_metadata
from .stored_tensors import StoredTensor
from .torch_files import CheckpointError, few, is_of_the_system, is_trusted, reason_of, refused_classes, with_file


class ShardFiles:
    """The tensors of a folder in torch.distributed.checkpoint's format.

    Args:
        weights_only: as for ``torch.load``. Unless it is False, nothing in the folder can run code, and no file outside
            of it is read; if its `.metadata` is a link, as in Hugging Face's cache, files beside its target may be.
        way_out: a sentence for the message if the folder is refused, on how to load it all the same.

    Raises:
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
        """The tensor of this name, not read yet."""
        found = self._metadata.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"the checkpoint {self.path} has no tensor {few([name])}")
        stored = torch.empty(found.size, dtype=found.properties.dtype, device="meta").as_subclass(StoredTensor)
        stored.files, stored.name_in_files = self, name
        return stored

    def read(self, name: str, into: Tensor) -> Tensor:
        """Copy a tensor from its files into another; into a DTensor, this rank's slice."""
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


def write_alone(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the shards of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def write_together(path: Path, folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this rank's shards of the checkpoint `path` into a folder. All ranks of the group must call it.

    Raises:
        RuntimeError: a rank failed; it tells which ones, and why.
    """
    try:
        dcp.save(tensors, storage_writer=_Writer(folder), process_group=group)
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {reason!r}" for rank, (reason, _) in sorted(error.failures.items()))
        raise RuntimeError(f"could not write the checkpoint {path}: {reasons}") from error


class _Writer(dcp.FileSystemWriter):
    """Raises the system's error, such as a full disk, instead of torch's: the other ranks are told the reason."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if (reason := system_error(error)) is None:
                raise
            raise OSError(*reason.args) from error
