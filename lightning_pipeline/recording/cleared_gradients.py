"""Gradients that a training step clears, by `zero_grad` or ``p.grad = None``: those of earlier batches, once a batch.

If each micro-batch did so when it comes to the line, it would clear what earlier micro-batches have added. Those of a
hand-optimized step do it together, where they next meet. With automatic optimization Lightning clears gradients between
the step and its backward, so there is nothing to do, unless they accumulate over batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor

from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.module_tensors import ModuleTensors

_GRADIENT: Any = Tensor.grad  # the descriptor
GETTERS = (_GRADIENT.__get__, getattr(Tensor, "_grad").__get__)  # noqa: B009  # mypy does not know it
"""The functions by which a tensor's gradient is read."""
_SETTERS = (_GRADIENT.__set__, _GRADIENT.__delete__)
GRADIENT_CALLS = frozenset((*GETTERS, *_SETTERS))


@dataclass(frozen=True)
class Clearing:
    """How a training step clears gradients.

    Attributes:
        later: makes a call for all micro-batches together, which takes its name; None with automatic optimization.
        accumulates: gradients of earlier batches are to stay.
    """

    later: Callable[[str, Callable[[], None]], None] | None = None
    accumulates: bool = False

    def answers(self, func: Any, args: Any, tensors: ModuleTensors) -> bool:
        """Whether a call, one of `GRADIENT_CALLS`, is to clear a gradient of the module's; then it has been dealt with,
        and gives None.

        Raises:
            NotImplementedError: the gradient accumulates over batches.
        """
        number = tensors.number_of(args[0])
        is_set = func in _SETTERS and (len(args) == 1 or args[1] is None)
        if number is None or not (is_set or (self.later is None and func in GETTERS and _is_in_zero_grad())):
            return False
        name = tensors.names[number][0]
        if self.accumulates:
            raise NotImplementedError(
                f"the gradient of {name} is cleared in training_step ({users_line()}), while gradients accumulate over "
                f"batches: clear it in on_train_batch_start"
            )
        if self.later is not None:
            self.later(f"the gradient of {name} set to None", partial(_clear, args[0]))
        return True


def _clear(parameter: Tensor) -> None:
    parameter.grad = None


def _is_in_zero_grad() -> bool:
    """Whether a `zero_grad` runs, which asks for each gradient before it clears it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "zero_grad":
            return True
        frame = frame.f_back
    return False
