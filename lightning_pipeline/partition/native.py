"""Calling functions within a stage, as if no replay were running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.partition.metadata import users_line

# What `torch.overrides` wraps for its context managers.
push_mode = torch._C._push_on_torch_function_stack
pop_mode = torch._C._pop_torch_function_stack


def run_without(mode: TorchFunctionMode, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `function` without `mode`; modes that the user's code has put on top of it stay in force.

    While a mode answers a torch function, torch has already taken it off the stack.
    """
    above = []
    found = False
    while not found and torch._C._len_torch_function_stack():
        top = pop_mode()
        found = top is mode
        if not found:
            above.append(top)
    for other in reversed(above):
        push_mode(other)
    try:
        return function(*args, **kwargs)
    finally:
        if found:
            for _ in above:
                pop_mode()
            push_mode(mode)
            for other in reversed(above):
                push_mode(other)


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one that computes its activations again in backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    return run


def grad_within_stage(*args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad, whose graph ends where the stage begins."""
    try:
        return torch.autograd.grad(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(
            f"torch.autograd.grad failed on one stage of a pipeline ({error}); values and parameters of earlier stages "
            f"are not in its graph, which is on another device. Differentiate with respect to values of this stage, or "
            f"cut the model elsewhere ({users_line()})"
        ) from error
