"""Refuses what torch puts around calls, and a stage that runs them later would not know of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from lightning_pipeline import _torch
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.placeholder import transform_error
from lightning_pipeline.partition.torch_functions import function_name
from lightning_pipeline.partition.users_code import users_line

_OWN = ("torch.", "lightning_pipeline.")
_SEES_CALLS = ("torch.utils.flop_counter", "torch.autograd.graph")
"""Where torch has modes for users."""


def refuse_transforms(function: Any) -> None:
    """Refuse a call on what a stage computes within a transform of ``torch.func``, or of forward-mode autograd."""
    if _torch.transform() is not None:
        raise transform_error(f"here by {function_name(function)}")
    if function_name(function) in ("_make_dual", "_unpack_dual"):
        raise NotImplementedError(
            f"forward-mode derivatives of what a stage computes cannot be had within a step ({users_line()}): take "
            f"torch.autograd.grad"
        )


@contextmanager
def contexts_refused(is_recording: Callable[[], bool]) -> Iterator[None]:
    """While entered, a step that is recorded cannot enter what would see its placeholders, and not the stages' data."""
    enter_mode, enter_hooks = _torch.TorchDispatchMode.__enter__, saved_tensors_hooks.__enter__

    def enter_mode_outside(mode: Any) -> Any:
        module = type(mode).__module__
        if is_recording() and (not module.startswith(_OWN) or module in _SEES_CALLS):
            raise NotImplementedError(
                f"{type(mode).__name__} would not see what the stages compute ({users_line()}): enter a "
                f"TorchFunctionMode in the step, which sees the calls of all stages, or run with num_stages=1"
            )
        return enter_mode(mode)

    def enter_hooks_outside(hooks: Any) -> None:
        if is_recording() and not hooks.pack_hook.__module__.startswith(_OWN):
            raise NotImplementedError(
                f"hooks on saved tensors would not see what the stages save ({users_line()}): use "
                f"torch.utils.checkpoint to save less"
            )
        return enter_hooks(hooks)

    with overridden() as override:
        override(_torch.TorchDispatchMode, "__enter__", enter_mode_outside)
        override(saved_tensors_hooks, "__enter__", enter_hooks_outside)
        yield
