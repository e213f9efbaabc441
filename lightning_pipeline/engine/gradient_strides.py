"""Strides of the gradients that a stage sends back.

A gradient's strides depend on the operation that made it, and the order in which kernels add elements depends on the
strides. They follow from the program, so only its first gradients are preceded by a message with their strides. If some
are not dense, such as the expanded gradient of a sum, the message is sent every time: a later gradient may have
distinct elements where the first one repeated a single element.

This makes results on the CPU equal to one process's bit by bit. On accelerators, where reading a message would
synchronize with the device, gradients are sent with the strides of the values.
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
    """The strides of one program's gradients between a visit and the previous one.

    Args:
        specs: specs of the values that the gradients belong to.

    Attributes:
        metas: shapes and dtypes for the receives, whatever the strides.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._dims = [len(spec.shape) for spec in specs]
        self._fixed: list[Strides] | None = None
        if not any(self._dims) or specs[0].device.type != "cpu":
            self._fixed = [wire(spec).stride for spec in specs]
        self._are_on_host = [spec.device.type == "cpu" for spec in specs]
        self._is_known = False
        self._first: Arriving | None = None
        self.metas = [TensorMeta(spec.shape, contiguous_strides(spec.shape), spec.dtype) for spec in specs]

    def announce(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The message with the strides to send before these gradients; None if the receiver knows them."""
        if self._fixed is not None:
            return None
        strides = [gradient.stride() for gradient in gradients]
        self._note(strides)
        return torch.tensor([step for stride in strides for step in stride], dtype=torch.int64)

    def to_send(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients laid out with the strides that the receiver expects."""
        if self._fixed is None:
            return list(gradients)
        return [_with_strides(one, stride) for one, stride in zip(gradients, self._fixed, strict=True)]

    def can_post(self) -> bool:
        """Whether it is known which messages come next; not so while the first strides are on their way."""
        return self._first is None

    def hear(self, what: str) -> None:
        """Wait for the first message, after which receives can be posted."""
        self.strides(self._first, what)

    def post(self, receive: Callable[[TensorMeta], Arriving]) -> Arriving | None:
        """Post the receive of the message with the next gradients' strides; None if they are known."""
        if self._fixed is not None:
            return None
        arriving = receive(TensorMeta((sum(self._dims),), (1,), torch.int64))
        if not self._is_known:
            self._first = arriving
        return arriving

    def strides(self, message: Arriving | None, what: str) -> list[Strides]:
        """The strides of the gradients that follow a message, or that came without one."""
        if message is None:
            assert self._fixed is not None
            return self._fixed
        steps = iter(message.wait(what).tolist())
        found = [tuple(islice(steps, dims)) for dims in self._dims]
        self._note(found)
        return found

    def where_values_are(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients that came on this rank's device; those of values on the host are taken there."""
        pairs = zip(gradients, self._are_on_host, strict=True)
        return [one.cpu() if is_on_host and not one.is_cpu else one for one, is_on_host in pairs]

    def _note(self, strides: list[Strides]) -> None:
        if not self._is_known:
            self._is_known, self._first = True, None
            if all(are_dense(meta.shape, stride) for meta, stride in zip(self.metas, strides, strict=True)):
                self._fixed = strides


def _with_strides(tensor: Tensor, stride: Strides) -> Tensor:
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
