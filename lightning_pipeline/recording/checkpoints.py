"""The checkpointed functions that a step calls, while it is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.event import CHECKPOINT_BEGINS, CHECKPOINT_ENDS, Event
from lightning_pipeline.recording.matcher import autocast_state
from lightning_pipeline.recording.path import mark
from lightning_pipeline.recording.python_again import ChangingCall, CheckpointCall, refuse_with_gradients
from lightning_pipeline.recording.reachable_state import Look

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


class Checkpoints:
    """Marks where checkpointed functions begin and end, and notes what they change.

    Attributes:
        depth: how many run, one within another.
        changing_calls: those that have changed something of Python, and have not run again.
        gradients_taken_at: the line in the running one that takes gradients; "" for none.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.changing_calls: list[ChangingCall] = []
        self.gradients_taken_at = ""
        self._has_deep = False  # one within another has changed something
        self._counters: list[Event] = []
        self._computed: dict[int, int] = {}  # the latest visit of each stage

    @contextmanager
    def entered(self, recording: Recording, call: CheckpointCall) -> Iterator[None]:
        mark(recording, CHECKPOINT_BEGINS, call.stops_early)
        begins, first_draw = recording.event, recording.num_draws
        look = Look(recording.recorder.places, call.function, (*call.args, *call.kwargs.values()))
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self._counters, self._computed = [], {}
        mark(recording, CHECKPOINT_ENDS)
        changed = look.changed()
        if self.gradients_taken_at and not self.depth:
            refuse_with_gradients(recording, begins, changed)
        if self.depth:
            self._has_deep |= bool(changed)
        elif changed:
            is_deep, self._has_deep = self._has_deep, False
            autocast, line = autocast_state(), users_line()
            self.changing_calls.append(
                ChangingCall(call, begins, recording.event, first_draw, autocast, changed, line, is_deep)
            )

    def note(self, event: Event, num_stages: int) -> bool:
        """Let what a function writes into the module without data of the batch, such as a counter, run with what it
        computes next on that stage, else with what it has computed last: they are computed again together.

        Returns:
            Whether the visit of an event has changed.
        """
        stage = event.visit % num_stages
        if event.gives_gradients():
            moved = [one for one in self._counters if one.visit % num_stages == stage and one.visit != event.visit]
            for one in moved:
                one.visit = event.visit
            self._counters = [one for one in self._counters if one.visit % num_stages != stage]
            self._computed[stage] = event.visit
            return bool(moved)
        if event.writes and all(type(value) is not int or value < 0 for value in event.inputs):
            before, event.visit = event.visit, self._computed.get(stage, event.visit)
            self._counters.append(event)
            return event.visit != before
        return False
