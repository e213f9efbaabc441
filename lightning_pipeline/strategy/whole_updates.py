"""Updates of sharded parameters by optimizers that look at whole matrices."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.runtime.fully_sharded import local_part, slice_like, whole
from lightning_pipeline.strategy.optimizers import OptimizerLayout


class WholeUpdates:
    """Lets an optimizer update whole parameters of which each replica keeps a slice.

    Adafactor takes means over rows and columns, and torch's does not run on DTensors; Muon multiplies matrices; what
    others do is not known. For the time of the update the optimizer holds gathered parameters and gradients, on every
    replica, and so its state stays whole, which for Adafactor is a row and a column of each matrix.

    Args:
        layout: the optimizer and the names of its parameters.
    """

    def __init__(self, layout: OptimizerLayout) -> None:
        self._optimizer = layout.optimizer
        self._gathered: dict[nn.Parameter, nn.Parameter] = {}

    def before_update(self) -> None:
        """When all gradients are final. All replicas must call it."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    gathered = nn.Parameter(whole(parameter))
                    gathered.grad = whole(parameter.grad)
                    self._gathered[parameter] = gathered  # type: ignore[index]
        self._exchange(self._gathered)

    def after_update(self) -> None:
        """Take this replica's slices of what was updated."""
        with torch.no_grad():
            for parameter, gathered in self._gathered.items():
                local_part(parameter).copy_(local_part(slice_like(parameter, gathered)))
        self._exchange({gathered: parameter for parameter, gathered in self._gathered.items()})
        self._gathered = {}

    def _exchange(self, new: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"][:] = [new.get(parameter, parameter) for parameter in group["params"]]
        state = self._optimizer.state
        for parameter in new.keys() & state.keys():
            state[new[parameter]] = state.pop(parameter)
