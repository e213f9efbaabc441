"""A step in parts: its micro-batches run up to a call that is the batch's, which is done once, and go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.suspended import BACKWARD, CLOSURE_ENDS, STEP_ENDS, Meeting, Suspended


class BatchWork(Protocol):
    """What the batch does where its micro-batches have met."""

    def before_backward(self) -> None:
        """Before the backward of the first micro-batch."""

    def after_backward(self, losses: Sequence[Tensor | None]) -> None:
        """After that of the last one. `losses`: of each micro-batch, where they were asked for."""

    def closure_value(self, values: Sequence[Tensor | None]) -> Tensor | None:
        """What the closures of the micro-batches come to."""


class Parts:
    """Runs the steps of a batch's micro-batches, part by part.

    Args:
        steps: of the micro-batches.
        around: entered around what micro-batches do, and not around what the batch does.
        resumed: entered around a micro-batch's own code.
        finish: does what there is to do of a micro-batch up to where it waits.
    """

    def __init__(
        self,
        states: Sequence[Microbatch],
        steps: Sequence[Suspended],
        work: BatchWork,
        *,
        around: Callable[[], AbstractContextManager[None]],
        resumed: Callable[[Microbatch], AbstractContextManager[None]],
        finish: Callable[[Microbatch, Meeting], None],
    ) -> None:
        self._states = states
        self._steps = steps
        self._work = work
        self._around = around
        self._resumed = resumed
        self._finish = finish

    def run(self) -> None:
        """Run the steps to their ends.

        Raises:
            RuntimeError: micro-batches come to different calls.
        """
        try:
            self._run_to(STEP_ENDS, lambda step: step.resume())
        finally:
            for step in self._steps:
                step.close()

    def _run_to(self, end: str, go_on: Callable[[Suspended], Meeting]) -> list[Meeting]:
        while True:
            meetings = self._next(go_on)
            if meetings[0].what == end:
                return meetings
            answer = self._perform(meetings)
            go_on = _answering(answer)

    def _next(self, go_on: Callable[[Suspended], Meeting]) -> list[Meeting]:
        """Where the micro-batches meet next."""
        meetings: list[Meeting] = []
        with self._around():
            for state, step in zip(self._states, self._steps, strict=True):
                with self._resumed(state):
                    meeting = go_on(step)
                if meetings and meeting.what != meetings[0].what:
                    raise RuntimeError(_differing(meetings[0], meeting, state.index))
                if meeting.what == BACKWARD and not meetings:
                    self._work.before_backward()
                self._finish(state, meeting)
                meetings.append(meeting)
        return meetings

    def _perform(self, meetings: Sequence[Meeting]) -> Any:
        """Do what the batch was called for. Returns what the call gives."""
        first = meetings[0]
        if first.what == BACKWARD:
            self._work.after_backward([meeting.loss for meeting in meetings])
            return None
        assert first.perform is not None
        return first.perform(self._run_closures if first.closure is not None else None)

    def _run_closures(self) -> Tensor | None:
        ended = self._run_to(CLOSURE_ENDS, lambda step: step.run_closure())
        return self._work.closure_value([meeting.loss for meeting in ended])


def _answering(answer: Any) -> Callable[[Suspended], Meeting]:
    return lambda step: step.resume(answer)


def _differing(first: Meeting, other: Meeting, index: int) -> str:
    there = f" ({other.line})" if other.line else ""
    here = f" ({first.line})" if first.line else ""
    return (
        f"micro-batch 0 comes to {first.what}{here} and micro-batch {index} to {other.what}{there}: what is done once "
        f"for the batch has to be called for by all of its micro-batches in the same order, whatever is in them"
    )
