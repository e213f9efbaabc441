"""One thing a rank does: compute, send or receive for one virtual stage and one micro-batch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from lightning_pipeline.schedules.errors import ScheduleError, shown
from lightning_pipeline.schedules.limits import MAX_PASSES


class Kind(str, Enum):
    """What an action does. Members compare and hash like their text, so ``Kind.F == "F"``."""

    F = "F"
    """Forward."""
    B = "B"
    """Whole backward: gradients of inputs and of weights."""
    I = "I"  # noqa: E741 - the field's own letter
    """Gradients of the inputs only."""
    W = "W"
    """Gradients of the weights only, after ``I``."""
    SEND_F = "SEND_F"
    """Hand the stage's outputs to the next stage."""
    RECV_F = "RECV_F"
    """Take the stage's inputs from the previous stage."""
    SEND_B = "SEND_B"
    """Hand the gradients of the stage's inputs to the previous stage."""
    RECV_B = "RECV_B"
    """Take the gradients of the stage's outputs from the next stage."""

    # Without it, Python 3.12 formats a member as "Kind.F".
    __str__ = str.__str__

    @property
    def is_compute(self) -> bool:
        """True for F, B, I and W."""
        return self in _COMPUTE


_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_NOTATION = re.compile(r"([0-9]+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]+)")
_MAX_DIGITS = 18  # of a number that is read at all, leading zeros too


@dataclass(frozen=True, slots=True, repr=False)
class Action:
    """A kind, a virtual stage and a micro-batch, printed as ``2F0``: stage 2, forward, micro-batch 0.

    ``kind`` may be given as text. The notation is that of ``torch.distributed.pipelining``.

    Raises:
        ScheduleError: for an unknown kind, a negative stage or micro-batch, or one beyond what any schedule has.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Kind):
            try:
                object.__setattr__(self, "kind", Kind(self.kind))
            except ValueError:
                kinds = ", ".join(Kind)
                raise ScheduleError(f"unknown kind of action {self.kind!r}; the kinds are {kinds}") from None
        if not (0 <= self.stage < MAX_PASSES and 0 <= self.microbatch < MAX_PASSES):
            raise ScheduleError(
                f"stage and micro-batch of an action count from 0 to {MAX_PASSES - 1:,}, got "
                f"stage={shown(self.stage)}, microbatch={shown(self.microbatch)}"
            )

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``2F0``, ``3RECV_B1`` and the like; surrounding blanks do not matter.

        Raises:
            ScheduleError: if ``text`` is anything else.
        """
        match = _NOTATION.fullmatch(text.strip())
        if match is None or max(len(match[1]), len(match[3])) > _MAX_DIGITS:
            raise ScheduleError(
                f"cannot read the action {shown(text)}; write stage, kind and micro-batch, such as 2F0, "
                f"with one of the kinds {', '.join(Kind)}, and numbers below {MAX_PASSES:,}"
            )
        stage, kind, microbatch = match.groups()
        return cls(Kind(kind), int(stage), int(microbatch))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    __repr__ = __str__
