"""Files of weights, of which a rank reads what it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")

Weights = str | Path | Mapping[str, str | Path]
Reader = Callable[[str], Tensor]


def load_weights(module: nn.Module, weights: Weights, wanted: Iterable[str]) -> set[str]:
    """Copy weights from files into the tensors of these names. Returns the names that the files have.

    A tensor that is tied is found under any of its names.

    Args:
        weights: a file, or the file of each submodule, by name: ``{"model": "gpt2/model.safetensors"}``. A file is a
            ``.safetensors``, an index of several (``model.safetensors.index.json``), a checkpoint of Lightning's or of
            torch's, or a folder: of a Hugging Face model, or of torch.distributed.checkpoint.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: it has another shape, or none of the names of its submodule.
    """
    files = weights if isinstance(weights, Mapping) else {"": weights}
    names = _names(module)
    found: set[str] = set()
    for prefix, path in files.items():
        if prefix:
            module.get_submodule(prefix)
        before = f"{prefix}." if prefix else ""
        readers = dict(_readers(Path(path)))
        inside = [name for aliases in names.values() for name in aliases if name.startswith(before)]
        if inside and not any(name.removeprefix(before) in readers for name in inside):
            raise ValueError(
                f"{path} has none of the weights of {prefix or type(module).__name__}: it has {_some(readers)}, and "
                f"the module {_some(name.removeprefix(before) for name in inside)}; name the submodule that the file "
                f"is of, as in weights={{'model': {str(path)!r}}}"
            )
        for name in wanted:
            aliases = [alias.removeprefix(before) for alias in names[name] if alias.startswith(before)]
            alias = next((alias for alias in aliases if alias in readers), None)
            if alias is not None:
                _copy(module, name, readers[alias](alias), path)
                found.add(name)
    return found


def _names(module: nn.Module) -> dict[str, list[str]]:
    """All names of each tensor, by each of them."""
    by_tensor: dict[int, list[str]] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            by_tensor.setdefault(id(tensor), []).append(name)
    return {name: names for names in by_tensor.values() for name in names}


def _some(names: Iterable[str]) -> str:
    """The first few, for an error."""
    return ", ".join([*islice(names, 3), "..."])


@torch.no_grad()
def _copy(module: nn.Module, name: str, value: Tensor, path: str | Path) -> None:
    owner, _, last = name.rpartition(".")
    tensor = getattr(module.get_submodule(owner), last)
    if value.shape != tensor.shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and {path} has {list(value.shape)}: build the model with the sizes "
            f"that the file was written with"
        )
    tensor.copy_(value)


def _readers(path: Path) -> Iterator[tuple[str, Reader]]:
    """The names of a file's tensors, each with a function that reads the one of a name."""
    if not path.exists():
        raise FileNotFoundError(f"weights: {path} does not exist")
    if path.is_dir():
        index = next((path / name for name in (*INDEXES, *SINGLE) if (path / name).is_file()), None)
        if index is not None:
            yield from _readers(index)
        elif (path / ".metadata").is_file():
            yield from _distributed(path)
        else:
            known = ", ".join((*INDEXES, *SINGLE, ".metadata"))
            raise FileNotFoundError(f"weights: the folder {path} has none of {known}")
    elif path.name.endswith(".index.json"):
        by_file: dict[str, list[str]] = {}
        for name, file in json.loads(path.read_text())["weight_map"].items():
            by_file.setdefault(file, []).append(name)
        for file, inside in by_file.items():
            readers = dict(_readers(path.parent / file))
            yield from ((name, readers[name]) for name in inside)
    elif path.suffix == ".safetensors":
        yield from _safetensors(path)
    else:
        content: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        state = content.get("state_dict", content)
        yield from ((name, state.__getitem__) for name, value in state.items() if isinstance(value, Tensor))


def _safetensors(path: Path) -> Iterator[tuple[str, Reader]]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError(f"weights: reading {path} takes the package safetensors: pip install safetensors") from None
    file = safe_open(path, framework="pt")
    yield from ((name, file.get_tensor) for name in file.keys())  # noqa: SIM118 (it is no dictionary)


def _distributed(path: Path) -> Iterator[tuple[str, Reader]]:
    """torch.distributed.checkpoint's folder: of a model's state dict, or of one under "state_dict"."""
    from torch.distributed import checkpoint as dcp

    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata

    def read(name: str) -> Tensor:
        key = name if name in metadata else f"state_dict.{name}"
        found: Any = metadata[key]
        into = {key: torch.empty(found.size, dtype=found.properties.dtype)}
        dcp.load(into, checkpoint_id=path, no_dist=True)
        return into[key]

    for key, found in metadata.items():
        if hasattr(found, "size") and not key.startswith("optimizer"):
            yield key.removeprefix("state_dict."), read
