"""Tensors of a checkpoint folder that are read lazily."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeline import _torch

if TYPE_CHECKING:
    from .shards import ShardFiles


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
