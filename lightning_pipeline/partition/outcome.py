"""How a stage's part of a step ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_pipeline.partition.absent import ValueId


class StageEnd(BaseException):
    """Unwinds the user's step at the end of the stage. No Exception, so that no handler of the user's catches it."""


class DivergenceError(RuntimeError):
    """A step whose events differ from the record."""


@dataclass(slots=True)
class Outcome:
    """What a stage's part of a step came to.

    Attributes:
        result: what the step returned; None before the last stage.
        outputs: the values that cross to the next stage, in the order of the plan (or, rehearsing, all that may).
        passed: how the data went past this stage without a call of its modules; empty if it did not.
    """

    result: Any = None
    outputs: dict[ValueId, Tensor] = field(default_factory=dict)
    passed: str = ""
