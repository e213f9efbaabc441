"""A step in parts: its micro-batches run up to a call that is the batch's, which is done once, and go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.suspended import BACKWARD, CLOSURE_ENDS, STEP_ENDS, Meeting, Suspended

MeetingOf = Callable[[Microbatch], Meeting]


class BatchWork(Protocol):
    """What the batch does where its micro-batches have met.

    Attributes:
        needs_losses: every rank is to have the data of the losses that backward is called on.
    """

    needs_losses: bool

    def before_part(self) -> None:
        """Before micro-batches go on."""

    def after_part(self) -> None:
        """After they have met for anything but a backward."""

    def before_backward(self) -> None:
        """Before the backward of the first micro-batch."""

    def after_backward(self, losses: Sequence[Tensor | None]) -> None:
        """After that of the last one. `losses`: of the micro-batches; data where it `needs_losses`."""

    def closure_value(self, values: Sequence[Tensor | None]) -> Tensor | None:
        """What the closures of the micro-batches come to."""


class Parts:
    """Runs the steps of a batch's micro-batches, part by part.

    Args:
        steps: of the micro-batches.
        around: entered around what micro-batches do, and not around what the batch does.
        resumed: entered around a micro-batch's own code.
        run: runs what there is of micro-batches up to where they meet, given what lets their own code go on to there.
    """

    def __init__(
        self,
        states: Sequence[Microbatch],
        steps: Sequence[Suspended],
        work: BatchWork,
        *,
        around: Callable[[], AbstractContextManager[None]],
        resumed: Callable[[Microbatch], AbstractContextManager[None]],
        run: Callable[[MeetingOf], None],
    ) -> None:
        self._states = states
        self._steps = steps
        self._work = work
        self._around = around
        self._resumed = resumed
        self._run = run
        self._go_on: Callable[[Suspended], Meeting] = Suspended.resume
        self._meetings: list[Meeting] = []

    def run(self) -> None:
        """Run the steps to their ends.

        Raises:
            RuntimeError: micro-batches come to different calls.
        """
        try:
            self._run_to(STEP_ENDS, Suspended.resume)
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
        self._go_on, self._meetings = go_on, []
        self._work.before_part()
        with self._around():
            self._run(self._meeting_of)
        if self._meetings[0].what == BACKWARD:
            self._work.after_backward([meeting.loss for meeting in self._meetings])
        else:
            self._work.after_part()
        return self._meetings

    def _meeting_of(self, state: Microbatch) -> Meeting:
        """Where a micro-batch's own code comes to next; that of those before it comes to it first."""
        while len(self._meetings) <= state.index:
            one = self._states[len(self._meetings)]
            with self._resumed(one):
                meeting = self._go_on(self._steps[one.index])
            first = self._meetings[0] if self._meetings else meeting
            if meeting.calls != first.calls:
                raise RuntimeError(_differing(first, meeting, one.index))
            if meeting is first:
                for _, perform in meeting.deferred:
                    perform()
                if meeting.what == BACKWARD:
                    self._work.before_backward()
            self._meetings.append(meeting)
        return self._meetings[state.index]

    def _perform(self, meetings: Sequence[Meeting]) -> Any:
        """Do what the batch was called for. Returns what the call gives."""
        first = meetings[0]
        if first.what == BACKWARD:  # is done
            return None
        assert first.perform is not None
        return first.perform(self._run_closures if first.closure is not None else None)

    def _run_closures(self) -> Tensor | None:
        ended = self._run_to(CLOSURE_ENDS, Suspended.run_closure)
        return self._work.closure_value([meeting.loss for meeting in ended])


def _answering(answer: Any) -> Callable[[Suspended], Meeting]:
    return lambda step: step.resume(answer)


def _differing(first: Meeting, other: Meeting, index: int) -> str:
    told = [(one.calls[-1] if len(one.calls) == 1 else " then ".join(one.calls), one.line) for one in (first, other)]
    (there, line), (here, other_line) = told
    return (
        f"micro-batch 0 comes to {there} ({line or 'the end of its step'}) and micro-batch {index} to {here} "
        f"({other_line or 'the end of its step'}): what is done once for the batch has to be called for by all of its "
        f"micro-batches in the same order, whatever is in them"
    )
