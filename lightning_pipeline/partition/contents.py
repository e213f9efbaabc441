"""Digests of what a recording has taken along, which ranks compare: it has to be the same on all of them."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition.ownership import HELD_BY

SAMPLE = 1 << 14
"""The most elements of a tensor that count; of a larger one, as many at even distances."""

Content = Sequence["int | Tensor"]


def contents(captured: Sequence[Any], known: Collection[int]) -> list[int | Tensor]:
    """For each thing taken along, a number that tells it from others, or the tensor of which `digests` makes one.

    Args:
        known: ids of the tensors that do not count.
    """
    found: list[int | Tensor] = []
    seen: dict[int, int | Tensor] = {}
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for thing in captured:
            if not isinstance(thing, Tensor):
                found.append(hash(thing) if isinstance(thing, (int, float, complex)) and thing == thing else 0)
                continue
            content = seen.get(id(thing))
            if content is None:
                content = seen[id(thing)] = 0 if id(thing) in known else _sample(thing)
            found.append(content)
    return found


def digests(content: Content) -> list[int]:
    """All of it as numbers, for which tensors come from their devices."""
    return [_digest(one) if isinstance(one, Tensor) else one for one in content]


def _sample(tensor: Tensor) -> int | Tensor:
    """The elements that count: none of what some ranks hold, and no floats on devices, where some kernels do not give
    the same bits twice."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    is_plain = is_plain and HELD_BY not in tensor.__dict__
    if not is_plain or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return 0
    is_on_cpu = tensor.device.type == "cpu"
    if not is_on_cpu and (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if len(flat) > SAMPLE:
        flat = flat[:: len(flat) // SAMPLE + 1]
    return _digest(flat) if is_on_cpu else flat.clone()


def _digest(flat: Tensor) -> int:
    return zlib.crc32(flat.cpu().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]
