"""Weight files to start from; each rank reads only its own part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.ownership import names_of_tensors
from lightning_pipeline.schedules.validation import read_text, shown

from .files import METADATA_FILE, is_relative
from .torch_files import (
    CheckpointError,
    few,
    is_of_the_system,
    load_torch_file,
    reason_of,
    with_file,
)

INDEX_ENDING = ".index.json"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
MAX_INDEX_BYTES = 2**26
"""Of an index: some hundred thousand tensors."""

_SAVE_WEIGHTS = (
    "If you trust it, load it yourself, and save its weights alone: "
    "torch.save(torch.load(path, weights_only=False)['state_dict'], other), or for a folder "
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, other)"
)

Weights = str | Path | Mapping[str, str | Path]
Reader = Callable[[str], Tensor]


def load_weights(module: nn.Module, weights: Weights, wanted: Iterable[str]) -> set[str]:
    """Copy weights from files into the wanted tensors. Returns the names of those that the files have.

    A tied tensor is found under any of its names.

    Args:
        weights: a file, or the file of each submodule, by name: ``{"model": "gpt2/model.safetensors"}``. A file is a
            ``.safetensors``, an index of several (``model.safetensors.index.json``), a checkpoint of Lightning or of
            torch, or a folder: of a Hugging Face model, or of torch.distributed.checkpoint.

    Raises:
        FileNotFoundError: a file does not exist.
        CheckpointError: it is damaged or has anything but tensors and plain values, or an index names a file that is
            not beside it.
        ValueError: a tensor has another shape, or the file has none of the names of its submodule, or the module has
            no such submodule.
    """
    files = weights if isinstance(weights, Mapping) else {"": weights}
    names = {name: aliases for aliases in names_of_tensors(module) for name in aliases}
    found: set[str] = set()
    for prefix, path in files.items():
        if prefix and prefix not in dict(module.named_modules(remove_duplicate=False)):
            raise ValueError(f"weights has the key {prefix!r}, which is no submodule of {type(module).__name__}")
        before = f"{prefix}." if prefix else ""
        readers = dict(_readers(Path(path)))
        inside = [name for aliases in names.values() for name in aliases if name.startswith(before)]
        if inside and not any(name.removeprefix(before) in readers for name in inside):
            raise ValueError(
                f"{path} has none of the weights of {prefix or type(module).__name__}: it has {few(list(readers))}, "
                f"and the module {few([name.removeprefix(before) for name in inside])}; name the submodule that the "
                f"file is of, as in weights={{'model': {str(path)!r}}}"
            )
        for name in wanted:
            aliases = [alias.removeprefix(before) for alias in names[name] if alias.startswith(before)]
            alias = next((alias for alias in aliases if alias in readers), None)
            if alias is not None:
                _copy(module, name, readers[alias](alias), path)
                found.add(name)
    return found


@torch.no_grad()
def _copy(module: nn.Module, name: str, value: Tensor, path: str | Path) -> None:
    owner, _, last = name.rpartition(".")
    tensor = getattr(module.get_submodule(owner), last)
    if value.shape != tensor.shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and {path} has {list(value.shape)}: build the model with the sizes "
            f"that the file was written with"
        )
    try:
        tensor.copy_(value)
    except RuntimeError as error:  # such as of a sparse tensor, or one without data
        raise CheckpointError(f"weights: {path} has no values to copy to {name}: {reason_of(error)}") from error


def _readers(path: Path) -> Iterator[tuple[str, Reader]]:
    """The names of a file's tensors, each with a function that reads the tensor of this name."""
    if not path.exists():
        raise FileNotFoundError(f"weights: {path} does not exist")
    if path.is_dir():
        index = next((path / name for name in (*INDEXES, *SINGLE) if (path / name).is_file()), None)
        if index is not None:
            yield from _readers(index)
        elif (path / METADATA_FILE).is_file():
            yield from _distributed(path)
        else:
            known = ", ".join((*INDEXES, *SINGLE, METADATA_FILE))
            raise FileNotFoundError(f"weights: the folder {path} has none of {known}")
    elif path.name.endswith(INDEX_ENDING):
        yield from _indexed(path)
    elif path.suffix == ".safetensors":
        yield from _safetensors(path)
    else:
        content: Any = load_torch_file(path, weights_only=True, way_out=_SAVE_WEIGHTS, mmap=True)
        state = content.get("state_dict", content) if isinstance(content, Mapping) else content
        if not isinstance(state, Mapping):
            raise CheckpointError(f"weights: {path} holds a {type(state).__name__}, and no state dict")
        yield from (
            (name, state.__getitem__)
            for name, value in state.items()
            if isinstance(name, str) and isinstance(value, Tensor)
        )


def _indexed(path: Path) -> Iterator[tuple[str, Reader]]:
    """The tensors of the files that an index of Hugging Face names, which lie beside it or below."""
    by_file: dict[str, list[str]] = {}
    for name, file in _weight_map(path).items():
        by_file.setdefault(file, []).append(name)
    for file, inside in by_file.items():
        if not is_relative(file):
            raise CheckpointError(f"weights: {path} names the file {shown(file)}, which is not in its folder")
        if file.endswith(INDEX_ENDING) or (path.parent / file).is_dir():
            raise CheckpointError(f"weights: {path} names {shown(file)}, which is no file of weights")
        readers = dict(_readers(path.parent / file))
        missing = [name for name in inside if name not in readers]
        if missing:
            raise CheckpointError(f"weights: {path} places {few(missing)} in {shown(file)}, which does not have it")
        yield from ((name, readers[name]) for name in inside)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        content = json.loads(read_text(path, kind="an index of weights", most=MAX_INDEX_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"weights: {path} is no index in JSON: {error}") from None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"weights: {path} has no weight_map, which gives each tensor's name the name of a file")
    return files


def _safetensors(path: Path) -> Iterator[tuple[str, Reader]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(f"weights: reading {path} takes the package safetensors: pip install safetensors") from None

    @contextmanager
    def errors_named() -> Iterator[None]:
        try:
            yield
        except (SafetensorError, RuntimeError, ValueError, OSError) as error:
            if is_of_the_system(error):
                raise with_file(error, path) from None
            raise CheckpointError(
                f"weights: {path} cannot be read as safetensors: {reason_of(error)}. It is damaged: copy it again"
            ) from error

    with errors_named():
        file = safe_open(path, framework="pt")
        names = list(file.keys())

    def read(name: str) -> Tensor:
        with errors_named():
            return file.get_tensor(name)

    yield from ((name, read) for name in names)


def _distributed(path: Path) -> Iterator[tuple[str, Reader]]:
    """The tensors of torch.distributed.checkpoint's folder, of a state dict or of a dict with a "state_dict"."""
    from .shards import ShardFiles

    files = ShardFiles(path, weights_only=True, way_out=_SAVE_WEIGHTS)
    names = [name for name in files.names() if not name.startswith("optimizer")]
    keys = {name.removeprefix("state_dict."): name for name in names} | {name: name for name in names}
    yield from ((name.removeprefix("state_dict."), lambda name: files.tensor(keys[name]).read()) for name in names)
