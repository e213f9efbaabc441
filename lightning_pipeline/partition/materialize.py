"""Gives memory and values to tensors on the meta device, on each rank only to those that it holds."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.rng import mix


def make_local(module: nn.Module, ownership: Ownership) -> dict[str, Tensor]:
    """Move every tensor on the meta device that this stage holds to the CPU, in place.

    Until something sets its values, they are a marker that cannot be taken for data (see `check_set`).

    Returns:
        These tensors, by their first name.
    """
    made = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta and (name not in ownership or ownership.is_local(name)):
            _give_memory(tensor)
            made[name] = tensor
    return made


def initialise(root: nn.Module, made: Iterable[Tensor], seed: int) -> None:
    """Give the tensors that `make_local` made the values that their modules give them in ``__init__``.

    That is done by ``reset_parameters``, which torch's own layers have, or by ``_init_weights`` of the Hugging Face
    model around them. Each module draws random numbers seeded by `seed` and its name, so the values are the same on any
    number of stages. A tensor that several modules share has the value that the first one gives it.
    """
    unset = {id(tensor) for tensor in made}
    places = Counter(id(tensor) for module in root.modules() for tensor in _own(module))
    settled: dict[int, Tensor] = {}
    for name, module, reset, is_family in _resets(root, "", None):
        inside = list(module.parameters()) if is_family else []
        tensors = {id(tensor): tensor for tensor in (*_own(module), *inside)}
        if reset is None or unset.isdisjoint(tensors):
            continue
        # A reset sets all of a module's tensors; those that had values keep them.
        before = {key: tensor.clone() for key, tensor in tensors.items() if key not in unset and not tensor.is_meta}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(mix(seed, zlib.crc32(name.encode())))
            reset()
            for key, value in (*before.items(), *settled.items()):
                if key in tensors:
                    tensors[key].copy_(value)
        settled.update({id(t): t.detach().clone() for t in _own(module) if places[id(t)] > 1 and id(t) not in settled})


def check_set(root: nn.Module, made: Iterable[str]) -> None:
    """Check that every tensor that `make_local` made has values by now."""
    for name in made:
        owner = root.get_submodule(name.rpartition(".")[0])
        tensor = getattr(owner, name.rpartition(".")[2])
        marker = _marker(tensor)
        if marker is None or (tensor.isnan() if marker != marker else tensor == marker).any():
            raise ValueError(
                f"{name} was built on the meta device, and nothing sets its values: give {type(owner).__name__} a "
                f"reset_parameters() that does, build this tensor outside of torch.device('meta'), or name a file that "
                f"has it in PipelineStrategy(weights=...)"
            )


def _give_memory(tensor: Tensor) -> None:
    marker = _marker(tensor)
    data = torch.empty_like(tensor, device="cpu")
    data.fill_(0 if marker is None else marker)
    full = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    # Hugging Face marks tensors whose values are set, and would leave these out.
    full.__dict__.update({key: value for key, value in tensor.__dict__.items() if key != "_is_hf_initialized"})
    torch.utils.swap_tensors(tensor, full)


def _marker(tensor: Tensor) -> float | None:
    """A value that stands for no value; None for bool, which has none to spare."""
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    if tensor.dtype == torch.bool:
        return None
    info = torch.iinfo(tensor.dtype)
    return info.min or info.max


def _resets(
    module: nn.Module, name: str, family: Any
) -> Iterator[tuple[str, nn.Module, Callable[[], Any] | None, bool]]:
    """Each module with its name and the function that sets its values, the inner modules first; and whether that
    function is Hugging Face's, which may set those of modules inside as well."""
    family = module if hasattr(module, "_init_weights") else family
    for child_name, child in module.named_children():
        yield from _resets(child, f"{name}.{child_name}" if name else child_name, family)
    if family is not None:
        yield name, module, lambda: family._init_weights(module), True
    elif _own(module):
        yield name, module, getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None)), False


def _own(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
