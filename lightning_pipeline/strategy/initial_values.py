"""What training sets out from is rank 0's on all ranks, as under DDP."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.runtime import backend_rules
from lightning_pipeline.runtime.failure import waiting_for

_CRC_BYTES = 4096


def take_initial_values(module: nn.Module, copies: Iterable[nn.Module], broadcast: Callable[[Any], Any]) -> None:
    """Give every rank rank 0's values of the parameters and buffers that both have. All ranks must call it.

    Each rank has made the module by itself, from random numbers of its own where no seed was set, where seeds differ,
    or where ranks have drawn unequally many; and weights may have been loaded on rank 0 alone, as DDP lets users do.
    Of each stage's own values the model would be that of no seed. With rank 0's it is the one that one process has
    with rank 0's seed, and a run that nobody seeded starts from one draw. Ranks with the same values, as those with
    one seed have, send nothing but checksums. What is on the meta device here is made or read later, alike on all
    ranks.

    Args:
        copies: modules that callbacks have made of this one; they stay copies.
        broadcast: gives every rank what rank 0 passes.
    """
    own = dict(_plain_tensors(module))
    copied = [dict(_plain_tensors(copy)) for copy in copies]
    sums = {name: _checksum(tensor) for name, tensor in own.items()}
    first: dict[str, Any] = broadcast(sums)
    differing = torch.tensor([name in own and sums[name] != first[name] for name in first], dtype=torch.uint8)
    if not len(differing):
        return
    with waiting_for("rank 0's initial values"), torch.no_grad():
        dist.all_reduce(differing, dist.ReduceOp.MAX)
        for name, is_sent in zip(first, differing.tolist(), strict=True):
            if not is_sent:
                continue
            shape, dtype, device, _ = first[name]
            tensor = own.get(name)
            if tensor is None or (tuple(tensor.shape), tensor.dtype) != (shape, dtype):  # another buffer
                tensor = torch.empty(shape, dtype=dtype, device=device)
            following = [copy[name] for copy in copied if name in copy and torch.equal(copy[name], tensor)]
            backend_rules.broadcast(tensor, 0)
            for copy in following:
                copy.copy_(tensor)


def _plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those with memory that all ranks have alike: no slices, and nothing that has no shape yet."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if is_plain and not tensor.is_meta and not tensor.is_quantized:
            yield name, tensor


def _checksum(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, str, tuple[int, int]]:
    """Shape, dtype, kind of device, and sums over the bits."""
    data = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    words = data[: data.numel() // 8 * 8]
    ends = torch.cat([data[:_CRC_BYTES], data[len(words) :]])
    sums = int(words.view(torch.int64).sum()), zlib.crc32(ends.numpy().tobytes())
    return tuple(tensor.shape), tensor.dtype, tensor.device.type, sums
