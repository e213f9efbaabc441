"""Loading of what this rank holds from a checkpoint folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.runtime.fully_sharded import slice_like
from lightning_pipeline.runtime.trees import map_tensors
from lightning_pipeline.strategy.optimizers import OptimizerLayout
from lightning_pipeline.strategy.stored_tensors import StoredTensor, only_checked


def load_module_from_folder(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True, check: Callable[[], None] = lambda: None
) -> Any:
    """Read this rank's part of a state dict straight into the module.

    Keys and shapes are compared first, those of other stages' tensors too.

    Args:
        check: of what else is to be loaded; called before anything is changed.

    Returns:
        What ``module.load_state_dict`` returns: missing and unexpected keys.

    Raises:
        RuntimeError: torch's own, with the keys and shapes that differ; nothing is changed then.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    state = {key: _sliced(parameters.get(key), value) for key, value in state.items()}
    with warnings.catch_warnings():
        # Copying into a meta tensor is just what skips it.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        with only_checked():
            module.load_state_dict(state, strict=strict)
        check()
        return module.load_state_dict(state, strict=strict)


def _sliced(parameter: nn.Parameter | None, value: Any) -> Any:
    """The value, and of one that a hook has put in for a sharded parameter this rank's slice."""
    is_whole = isinstance(value, Tensor) and not isinstance(value, (StoredTensor, DTensor))
    if isinstance(parameter, DTensor) and is_whole and value.shape == parameter.shape:
        return slice_like(parameter, value)
    return value


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
