"""The work of torch's operations: floating-point operations, memory traffic, and what they take on a given device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does in a second.

    Attributes:
        flops: floating-point operations of matrix products, as they are reached, not the peak.
        memory_bytes: bytes that are read and written.
        launch: seconds that any operation takes at least.
    """

    flops: float
    memory_bytes: float
    launch: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations, and seconds on the device that was asked about."""

    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.seconds + other.seconds)


def work_of(func: Any, args: Any, kwargs: Any, result: Any, speed: DeviceSpeed) -> Work:
    """The work of one call of an ATen operation: as long as its arithmetic or its memory traffic takes."""
    if _is_view(func):
        return Work()
    packet = func._overloadpacket
    flops = 0.0
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
    elif "scaled_dot_product" in packet.__name__:  # variants that torch does not count, that for the CPU among them
        flops = _attention_flops(args, backward="backward" in packet.__name__)
    size = sum(t.numel() * t.element_size() for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
    return Work(flops, max(flops / speed.flops, size / speed.memory_bytes, speed.launch))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def _attention_flops(args: Any, *, backward: bool) -> float:
    shaped = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 4]
    query, key, value = shaped[1:4] if backward else shaped[:3]
    scores = math.prod(query.shape[:3]) * key.shape[2]
    forward = 2.0 * scores * (query.shape[3] + value.shape[3])
    return 2.5 * forward if backward else forward


def measured_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """A short measurement of matrix products and additions on a device."""
    from lightning_pipeline.partition.timing import Clock

    clock = Clock(device)
    size = 512 if device.type == "cpu" else 4096
    one = torch.rand(size, size, device=device).to(dtype)
    many = torch.rand(size * size * 8, device=device).to(dtype)
    small = torch.rand(8, device=device).to(dtype)

    def fastest(function: Any) -> float:
        marks = [clock.mark()]
        for _ in range(6):
            function()
            marks.append(clock.mark())
        times = clock.seconds(marks)
        return max(min(b - a for a, b in pairwise(times[1:])), 1e-9)

    return DeviceSpeed(
        flops=2.0 * size**3 / fastest(lambda: one @ one),
        memory_bytes=3.0 * many.numel() * many.element_size() / fastest(lambda: many + many),
        launch=fastest(lambda: small + small),
    )
