"""Tensor parallelism within a stage, which the user's `configure_model` has set up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.runtime.backends import broadcast, warm_up
from lightning_pipeline.runtime.failure import waiting_for


class TensorGroup:
    """The ranks among which a replica of a stage is split. They see the same data and draw the same random numbers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        warm_up(group)
        self._source = dist.get_global_rank(group, 0)

    def same(self, value: Any) -> Any:
        """The first rank's value, on all of them."""
        values = [value]
        with waiting_for("the first tensor-parallel rank's batch"):
            dist.broadcast_object_list(values, self._source, group=self.group)
        return values[0]

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast the first rank's values of tensors that are not split."""
        with waiting_for("the first tensor-parallel rank's values"):
            for tensor in tensors:
                if not isinstance(tensor, DTensor):
                    broadcast(tensor, self._source, self.group)


def place_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Redistribute gradients as their parameters are: that of a replicated parameter may be a partial sum."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
