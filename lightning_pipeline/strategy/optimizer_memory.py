"""How much an optimizer keeps of each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_USUAL = 2.0
"""What AdamW keeps, for optimizers that cannot be tried."""


def state_per_parameter(optimizer: Optimizer) -> float:
    """Numbers of optimizer state for each number of a parameter: 2 for AdamW, 1 for SGD with momentum, 0 without.

    It is tried out: the same optimizer updates a small matrix once.
    """
    matrix = nn.Parameter(torch.zeros(16, 16))
    matrix.grad = torch.zeros_like(matrix)
    try:
        options = {key: copy.copy(value) for key, value in optimizer.defaults.items()}
        tried = type(optimizer)([matrix], **options)
        tried.step()
        state = tried.state[matrix]
    except Exception:  # optimizers take whatever arguments they like, and this is an estimate
        return _USUAL
    return sum(value.numel() for value in state.values() if isinstance(value, Tensor) and value.dim()) / matrix.numel()


def bytes_with_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[str], float]:
    """A function that gives the bytes of a parameter, by name, with its gradient and optimizer state.

    Without optimizers the state is taken to be AdamW's.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shares: dict[int, float] = {}
    for optimizer in optimizers:
        share = state_per_parameter(optimizer)
        for group in optimizer.param_groups:
            shares.update((id(parameter), share) for parameter in group["params"])

    def state_bytes(name: str) -> float:
        parameter = parameters[name]
        share = shares.get(id(parameter), 0.0 if optimizers else _USUAL)
        return parameter.numel() * parameter.element_size() * (1.0 + parameter.requires_grad * (1.0 + share))

    return state_bytes
