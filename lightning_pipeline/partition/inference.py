"""What an operation gives, found out on fake tensors: looks of the result, what it shares memory with, what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.operation import Call, put_together
from lightning_pipeline.partition.placeholder import Look
from lightning_pipeline.partition.tree import Layout

_UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True, slots=True)
class Result:
    """What an operation gives.

    Attributes:
        layout: of the result; its slots number `tensors`.
        tensors: for each, its look, or the number of the argument that it is.
        shares: for each new tensor, the arguments whose memory it shares.
        writes: the arguments that are written into, each with its look afterwards.
    """

    layout: Layout
    tensors: tuple[Look | int, ...]
    shares: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, Look], ...]


class Inference:
    """Runs functions on fake tensors of one process. Autograd, autocast and the default dtype are as they are now."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def result(self, function: Any, call: Call, looks: Sequence[Look]) -> Result | None:
        """What `function` gives; None where only the data tells, or torch does not know.

        Args:
            looks: of the call's tensors.
        """
        fakes = [self._fake(look) for look in looks]
        storages = [_storage(fake) for fake in fakes]
        versions = [fake._version for fake in fakes]
        try:
            with self._mode:
                found = function(
                    *put_together(call.args, fakes, call.numbers), **put_together(call.kwargs, fakes, call.numbers)
                )
        except _UNKNOWN:
            return None
        made, layout = tree.flatten(found)
        numbers = {id(fake): number for number, fake in enumerate(fakes)}
        tensors: list[Look | int] = []
        shares: list[tuple[int, ...]] = []
        for tensor in made:
            number = numbers.get(id(tensor))
            tensors.append(Look.of(tensor) if number is None else number)
            own = _storage(tensor)
            shares.append(() if own is None else tuple(i for i, other in enumerate(storages) if other == own))
        writes = tuple(
            (number, Look.of(fake))
            for number, (fake, version, look) in enumerate(zip(fakes, versions, looks, strict=True))
            if fake._version != version or Look.of(fake) != look
        )
        return Result(layout, tuple(tensors), tuple(shares), writes)

    def _fake(self, look: Look) -> Tensor:
        assert look.stride is not None
        with self._mode, torch.inference_mode(False):
            made = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device=look.device)
            if look.is_parameter:
                return nn.Parameter(made, requires_grad=look.requires_grad)
            if not look.requires_grad:
                return made
            made.requires_grad_()
            if look.is_leaf:
                return made
            with torch.enable_grad():  # a tensor of the graph, that may be written into
                return torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device=look.device).copy_(made)


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
