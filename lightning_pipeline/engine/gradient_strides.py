"""Strides of the gradients that a stage sends back.

A gradient has whatever strides the operation gave it that made it, and what adds it up does so in an order that depends
on them. They follow from the program, so the first gradients of one are preceded by their strides, and later ones look
alike. Where some have no dense memory, as what comes of a sum or a slice, strides precede them every time: a gradient
whose elements all differ would not fit those of one that repeats a single element.

That is for bits that equal one process's, which the CPU gives. On other devices, where to read a message is to wait for
the device, gradients have the strides of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from lightning_pipeline.engine.microbatch import Arriving
from lightning_pipeline.partition.memory import contiguous_strides
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.runtime.backends import are_dense
from lightning_pipeline.runtime.tensor_meta import TensorMeta, wire

Strides = tuple[int, ...]


class GradientStrides:
    """What a rank knows of one program's gradients on their way from one visit to the one before.

    Args:
        specs: of the values whose gradients they are.

    Attributes:
        metas: as which they are received, before their strides are known.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._dims = [len(spec.shape) for spec in specs]
        self._fixed: list[Strides] | None = None
        if not any(self._dims) or specs[0].device.type != "cpu":
            self._fixed = [wire(spec).stride for spec in specs]
        self._is_known = False
        self._first: Arriving | None = None
        self.metas = [TensorMeta(spec.shape, contiguous_strides(spec.shape), spec.dtype) for spec in specs]

    def announce(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The message that precedes these, if any does."""
        if self._fixed is not None:
            return None
        strides = [gradient.stride() for gradient in gradients]
        self._note(strides)
        return torch.tensor([step for stride in strides for step in stride], dtype=torch.int64)

    def to_send(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients with memory in the order that the receiver knows of."""
        if self._fixed is None:
            return list(gradients)
        return [_with_strides(one, stride) for one, stride in zip(gradients, self._fixed, strict=True)]

    def can_post(self) -> bool:
        """Whether it is known what comes next."""
        return self._first is None

    def hear(self, what: str) -> None:
        """Wait for the first message, so that it is."""
        self.strides(self._first, what)

    def post(self, receive: Callable[[TensorMeta], Arriving]) -> Arriving | None:
        """Post the receive of the message that precedes the next ones, if any does."""
        if self._fixed is not None:
            return None
        arriving = receive(TensorMeta((sum(self._dims),), (1,), torch.int64))
        if not self._is_known:
            self._first = arriving
        return arriving

    def strides(self, message: Arriving | None, what: str) -> list[Strides]:
        """Those of what has come after a message, or without one."""
        if message is None:
            assert self._fixed is not None
            return self._fixed
        steps = iter(message.wait(what).tolist())
        found = [tuple(islice(steps, dims)) for dims in self._dims]
        self._note(found)
        return found

    def _note(self, strides: list[Strides]) -> None:
        if not self._is_known:
            self._is_known, self._first = True, None
            if all(are_dense(meta.shape, stride) for meta, stride in zip(self.metas, strides, strict=True)):
                self._fixed = strides


def _with_strides(tensor: Tensor, stride: Strides) -> Tensor:
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
