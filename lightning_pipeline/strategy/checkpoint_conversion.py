"""Checkpoint folders into plain files, and back, in one process."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from lightning_pipeline.strategy.atomic_file import publish, remove, unfinished
from lightning_pipeline.strategy.checkpoint_check import check_optimizer_states
from lightning_pipeline.strategy.checkpoint_folder import (
    is_folder,
    like_meta,
    read_folder,
    replace_stored,
    replace_tensors,
    tensor_places,
    write_meta,
)
from lightning_pipeline.strategy.torch_files import CheckpointError, load_torch_file

_TRUST_IT = "If you trust it, convert it with weights_only=False (--no-weights-only)"


@dataclass(frozen=True)
class Conversion:
    """What was done: into a folder or a file, so many tensors, so many bytes of them."""

    into_folder: bool
    num_tensors: int
    num_bytes: int


def convert_checkpoint(source: Path, destination: Path, *, weights_only: bool = True) -> Conversion:
    """Write a folder as a plain Lightning file, or such a file as a folder. What the destination had before is lost.

    Args:
        source: a folder that ``save_distributed_checkpoint=True`` has written, or a ``.ckpt`` file.
        destination: where the other kind is written.
        weights_only: as for ``torch.load``: False also loads objects, which run code of their own.

    Raises:
        FileNotFoundError: there is no source, or the folder is no checkpoint.
        CheckpointError: the source is damaged or not whole, no checkpoint, or has objects that ``weights_only``
            refuses.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    try:
        if is_folder(source):
            return _to_file(source, destination.absolute(), weights_only)
        return _to_folder(source, destination.absolute(), weights_only)
    finally:
        remove(unfinished(destination.absolute()))


def _to_file(source: Path, destination: Path, weights_only: bool) -> Conversion:
    checkpoint = read_folder(source, weights_only, way_out=_TRUST_IT)
    tensors = replace_stored(checkpoint)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(destination).open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    publish(destination)
    return _summary(tensors, into_folder=False)


def _to_folder(source: Path, destination: Path, weights_only: bool) -> Conversion:
    checkpoint: Any = load_torch_file(source, weights_only=weights_only, way_out=_TRUST_IT, mmap=True)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise CheckpointError(f"{source} is no checkpoint of Lightning's: it has no state_dict")
    check_optimizer_states(checkpoint.get("optimizer_states", []), str(source))
    # A file has no names of parameters in its optimizer states: positions do as well.
    names = [
        [str(position) for position in range(sum(len(group["params"]) for group in optimizer["param_groups"]))]
        for optimizer in checkpoint.get("optimizer_states", [])
    ]
    tensors: dict[str, Tensor] = {}
    stand_ins: dict[Any, Tensor] = {}

    def take(tensor: Tensor, name: str) -> Tensor:
        memory = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.numel() == 0 or memory not in stand_ins:
            tensors[name], stand_ins[memory] = tensor, like_meta(tensor)
        return stand_ins[memory]

    replace_tensors(tensor_places(checkpoint, ["state_dict"], names), take)
    folder = unfinished(destination)
    remove(folder)
    folder.mkdir(parents=True)
    write_meta(folder, checkpoint, ["state_dict"], names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    publish(destination)
    return _summary(list(tensors.values()), into_folder=True)


def _summary(tensors: list[Tensor], *, into_folder: bool) -> Conversion:
    return Conversion(into_folder, len(tensors), sum(tensor.nbytes for tensor in tensors))
