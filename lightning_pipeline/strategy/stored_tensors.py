"""Tensors of a checkpoint folder, read when they are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_pipeline.runtime.trees import map_tensors


class ShardFiles:
    """The tensors of a folder in torch.distributed.checkpoint's format.

    Raises:
        ValueError: its files are not all there, or shorter than they were written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _Reader(path)
        ends: dict[str, int] = {}
        for stored in (self._reader.metadata.storage_data or {}).values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        for name, end in ends.items():
            size = (path / name).stat().st_size if (path / name).is_file() else None
            if size is None or size < end:
                found = "is missing" if size is None else f"has {size} of {end} bytes"
                raise ValueError(f"the checkpoint {path} is not whole: its file {name} {found}")

    def names(self) -> set[str]:
        """All tensors."""
        return set(self._reader.metadata.state_dict_metadata)

    def tensor(self, name: str) -> StoredTensor:
        """The tensor of this name, not read yet.

        Raises:
            ValueError: there is none.
        """
        found = self._reader.metadata.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"the checkpoint {self.path} has no tensor {name!r}")
        stored = torch.empty(found.size, dtype=found.properties.dtype, device="meta").as_subclass(StoredTensor)
        stored.files, stored.name_in_files = self, name
        return stored

    def read(self, name: str, into: Tensor) -> Tensor:
        """Copy a tensor to where it belongs; of a DTensor, this rank's slice."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({name: into.detach()}, storage_reader=self._reader, planner=planner, no_dist=True)
        return into


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once, however many tensors follow."""

    @cached_property
    def metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class StoredTensor(Tensor):
    """Stands for a tensor in files.

    Lightning hands a loaded checkpoint to hooks of the module and of callbacks, which may look at a tensor's shape,
    give it another key, or compute with it, before the module and the optimizers take over what they need. So a
    checkpoint of shards looks like any other: shapes are known, copying to a tensor reads straight into it, and any
    other operation first reads the whole tensor to the CPU. What is never used is never read.
    """

    files: ShardFiles
    name_in_files: str

    def read(self) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.files.read(self.name_in_files, torch.empty(self.shape, dtype=self.dtype))

    def read_like(self, sharded: Tensor) -> Tensor:
        """This rank's slice, as `sharded` has one of a tensor of the same shape."""
        return self.files.read(self.name_in_files, torch.empty_like(sharded, dtype=self.dtype, requires_grad=False))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _IS_META:
            return False
        if func is Tensor.copy_ and not isinstance(args[0], StoredTensor) and args[0].shape == args[1].shape:
            target, stored = args[:2]
            if not target.is_meta:
                stored.files.read(stored.name_in_files, target)
            return target
        read = [map_tensors(values, StoredTensor.read, kind=StoredTensor) for values in (args, kwargs)]
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
