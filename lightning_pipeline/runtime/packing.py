"""Values of a step in one message of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_pipeline.partition.placeholder import Look
from lightning_pipeline.runtime.backend_rules import flat
from lightning_pipeline.runtime.tensor_meta import conform, laid_out, wire

_ALIGNMENT = 8
"""Bytes; every dtype can view what begins at a multiple of them."""


def num_bytes(looks: Sequence[Look]) -> int:
    """The size of a message."""
    return sum(map(_padded, looks))


def places(looks: Sequence[Look]) -> Iterator[slice]:
    """Where the values are in a message."""
    start = 0
    for look in looks:
        yield slice(start, start + look.num_bytes)
        start += _padded(look)


def as_bytes(tensor: Tensor, look: Look) -> Tensor:
    """A value's memory as it travels, on the host."""
    return flat(conform(tensor.detach(), look).cpu()).reshape(-1).view(torch.uint8)


def from_bytes(content: Tensor, look: Look) -> Tensor:
    """The value in a part of a message, on the host. It shares the message's memory, where that is laid out alike."""
    meta = wire(look)
    return laid_out(content.view(meta.dtype).as_strided(meta.shape, meta.stride), look.stride)


def _padded(look: Look) -> int:
    return math.ceil(look.num_bytes / _ALIGNMENT) * _ALIGNMENT
