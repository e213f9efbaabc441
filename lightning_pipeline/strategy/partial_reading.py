"""Reading of this rank's part of optimizer states from a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.runtime.trees import map_tensors
from lightning_pipeline.strategy.optimizers import OptimizerLayout
from lightning_pipeline.strategy.stored_tensors import StoredTensor


def read_optimizer_state(layout: OptimizerLayout, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A full state dict in which the states of this rank's parameters are read, for ``layout.load_state``."""
    held = dict(layout.local_parameters())
    names = layout.names
    state: dict[Any, Any] = {}
    for position, saved in state_dict["state"].items():
        if not isinstance(position, int):
            state[position] = map_tensors(saved, StoredTensor.read, kind=StoredTensor)
        elif (parameter := held.get(names[position])) is not None:
            state[position] = {key: _read(value, parameter, layout) for key, value in saved.items()}
    return {**state_dict, "state": state}


def _read(value: Any, parameter: nn.Parameter, layout: OptimizerLayout) -> Any:
    is_sliced = isinstance(parameter, DTensor) and layout.is_elementwise
    if is_sliced and isinstance(value, StoredTensor) and value.shape == parameter.shape:
        return value.read_like(parameter)
    return map_tensors(value, StoredTensor.read, kind=StoredTensor)
