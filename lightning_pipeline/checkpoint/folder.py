"""The checkpoint folder format: reading it, and converting it to a plain file and back.

A folder holds one Lightning checkpoint:

- ``meta.pt``: the checkpoint as plain Lightning would write it, keys, order and positional ids included, with tensors
  on the meta device instead of those that are in shards. Tied tensors are one tensor.
- torch.distributed.checkpoint's files (``.metadata``, ``*.distcp``): the tensors, by names such as
  ``state_dict.net.head.weight`` and ``optimizer_0.state.net.head.weight.exp_avg``; a tied tensor has its first name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.schedules.validation import shown

from .check import check_optimizer_states
from .files import METADATA_FILE, TRUST_IT, entry_at, replacing, tensors_in, written_to_disk
from .stored_tensors import StoredTensor
from .torch_files import CheckpointError, few, load_torch_file, reason_of

META_FILE = "meta.pt"
FORMAT = "lightning_pipeline checkpoint folder, version 1"
_CONVERT_IT = "If you trust it, convert it with weights_only=False (--no-weights-only)"
Place = tuple[dict[Any, Any], Any, str]
"""A dict, the key of a tensor in it, and the tensor's name in the shards."""


def is_folder(path: str | Path) -> bool:
    """Whether `path` is a local folder, as opposed to a file or an address."""
    return "://" not in str(path) and Path(path).is_dir()


def tensor_places(
    checkpoint: dict[str, Any], sections: Sequence[str], parameter_names: Sequence[Sequence[str]]
) -> Iterator[Place]:
    """The places in a checkpoint of the tensors that go into shards.

    Args:
        sections: keys of the checkpoint with state dicts of the module: "state_dict", and what callbacks add.
        parameter_names: of each optimizer, by positional id.
    """
    states = [(section, checkpoint[section]) for section in sections]
    optimizers = zip(checkpoint.get("optimizer_states", []), parameter_names, strict=True)
    for index, (optimizer, names) in enumerate(optimizers):
        for position, state in optimizer.get("state", {}).items():
            if isinstance(position, int):
                states.append((f"optimizer_{index}.state.{names[position]}", state))
    for prefix, state in states:
        yield from ((state, key, f"{prefix}.{key}") for key, value in list(state.items()) if isinstance(value, Tensor))


def replace_tensors(places: Iterator[Place], new: Callable[[Tensor, str], Tensor]) -> None:
    """Put ``new(tensor, name)`` in each place; a tensor in several places stays one."""
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for container, key, name in places:
        old = container[key]
        if id(old) not in done:
            done[id(old)] = old, new(old, name)  # the old one is kept, so that no other takes its id
        container[key] = done[id(old)][1]


def read_folder(path: str | Path, weights_only: bool | None = None, *, way_out: str = TRUST_IT) -> dict[str, Any]:
    """The checkpoint in a folder, with tensors that are read when they are used.

    Args:
        weights_only: as for ``torch.load``. Unless it is False, nothing in the folder can run code.
        way_out: a sentence for the message if it has objects, on how to load it all the same.

    Raises:
        FileNotFoundError: the folder is no such checkpoint.
        CheckpointError: it is damaged or not whole, of a later format, or has objects that ``weights_only`` refuses.
    """
    path = Path(path)
    missing = [name for name in (META_FILE, METADATA_FILE) if not (path / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the folder {path} is no checkpoint that save_distributed_checkpoint=True has written: it has no "
            f"{' and no '.join(missing)}"
        )
    content = load_torch_file(path / META_FILE, weights_only=weights_only, way_out=way_out)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path / META_FILE} is in the format {shown(found)}, and this version reads {FORMAT!r}")
    from .shards import ShardFiles

    files = ShardFiles(path, weights_only, way_out=way_out)

    def stored(tensor: Tensor, name: str) -> Tensor:
        found = files.tensor(name) if tensor.is_meta else tensor
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"the checkpoint {path} is damaged: {few([name])} is {tuple(tensor.shape)} of {tensor.dtype} by its "
                f"{META_FILE}, and {tuple(found.shape)} of {found.dtype} by its {METADATA_FILE}"
            )
        return found

    try:
        checkpoint: dict[str, Any] = content["checkpoint"]
        replace_tensors(tensor_places(checkpoint, content["sections"], content["parameter_names"]), stored)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / META_FILE} is damaged: {reason_of(error)}") from error
    return checkpoint


def replace_stored(checkpoint: Any) -> list[Tensor]:
    """Read all tensors of a checkpoint that `read_folder` gave, in their places. Returns them, tied ones once."""
    read: dict[int, Tensor] = {}
    for path, tensor in list(tensors_in(checkpoint)):
        if isinstance(tensor, StoredTensor):
            if id(tensor) not in read:
                read[id(tensor)] = tensor.read()
            entry_at(checkpoint, path[:-1])[path[-1]] = read[id(tensor)]
    return list(read.values())


def write_meta(
    path: Path, checkpoint: dict[str, Any], sections: Sequence[str], parameter_names: Sequence[Sequence[str]]
) -> None:
    """Write a folder's `meta.pt`, of a checkpoint with meta tensors instead of those in shards."""
    content = {
        "format": FORMAT,
        "checkpoint": checkpoint,
        "sections": list(sections),
        "parameter_names": [list(names) for names in parameter_names],
    }
    with written_to_disk(path / META_FILE) as file:
        torch.save(content, file)


def like_meta(tensor: Tensor, name: str = "") -> Tensor:
    """The whole tensor's shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def convert_checkpoint(source: Path, destination: Path, *, weights_only: bool = True) -> list[Tensor]:
    """Write a folder as a plain Lightning file, or such a file as a folder. Replaces what is at the destination.

    Args:
        source: a folder that ``save_distributed_checkpoint=True`` has written, or a ``.ckpt`` file.
        weights_only: as for ``torch.load``: False also loads objects, which run code of their own.

    Returns:
        The tensors that were written, tied ones once.

    Raises:
        FileNotFoundError: the source does not exist, or is a folder and no checkpoint.
        CheckpointError: the source is damaged or not whole, no checkpoint, or has objects that ``weights_only``
            refuses.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    convert = _to_file if is_folder(source) else _to_folder
    return convert(source, destination.absolute(), weights_only)


def _to_file(source: Path, destination: Path, weights_only: bool) -> list[Tensor]:
    checkpoint = read_folder(source, weights_only, way_out=_CONVERT_IT)
    tensors = replace_stored(checkpoint)
    with replacing(destination) as written, written_to_disk(written) as file:
        torch.save(checkpoint, file)
    return tensors


def _to_folder(source: Path, destination: Path, weights_only: bool) -> list[Tensor]:
    checkpoint: Any = load_torch_file(source, weights_only=weights_only, way_out=_CONVERT_IT, mmap=True)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise CheckpointError(f"{source} is no checkpoint of Lightning's: it has no state_dict")
    check_optimizer_states(checkpoint.get("optimizer_states", []), str(source))
    # A file does not name the parameters of its optimizer states: positions serve as names.
    names = [
        [str(position) for position in range(sum(len(group["params"]) for group in optimizer.get("param_groups", [])))]
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
    from .shards import write_alone

    with replacing(destination) as folder:
        folder.mkdir()
        write_meta(folder, checkpoint, ["state_dict"], names)
        write_alone(tensors, folder)
    return list(tensors.values())
