"""Assigns each event of a step to a visit of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_pipeline.recording.event import MICROBATCHES_MEET, Event
from lightning_pipeline.recording.inference import Result
from lightning_pipeline.recording.matcher import CAPTURED, EarlierValue, HookTensor
from lightning_pipeline.recording.views import Memory, Views


class Placing:
    """Places the events of one path, one after the other.

    Visits are numbered along the data: visit ``v`` is on stage ``v % num_stages``, in lap ``v // num_stages``. An event
    runs where its latest input is; in a module that has a stage, on the next visit of that stage. What follows where
    micro-batches meet begins another lap: all that was made before is on its stage's first visit from there on.

    Args:
        until: what the path has so far.
    """

    def __init__(self, num_stages: int, tensors: Any, until: Event) -> None:
        self._num_stages = num_stages
        self._tensors = tensors
        self.visits: dict[int, int] = {}
        self.latest = 0
        self._begins = 0  # the part after the last meeting
        self.memory = Memory()
        self._uses: dict[Any, _Uses] = {}  # by memory
        self._first_uses: dict[int, int] = {}  # of the module's tensors, the visit
        self.views = Views()
        self.end = until
        for event in until.path():
            self.note(event)

    def visit_of(self, inputs: Sequence[Any], result: Result, stage: tuple[int | None, int]) -> int:
        """Where an event with these inputs runs.

        Args:
            stage: of the module that calls it, None where no key says one, and the lowest that it may have.
        """
        needed = [self._in_part(self._needed(value)) for value in inputs if value is not None]
        written = [
            self._in_part(self._uses_of(inputs[slot]).read) for slot, _ in result.writes if type(inputs[slot]) is int
        ]
        known = [visit for visit in needed if visit >= 0]
        after = max([*known, *written], default=-1)
        fixed, lowest = stage
        if fixed is None:
            if after >= 0:
                fixed = max(after % self._num_stages, lowest, self._stage_of_keys(inputs))
                fixed = self._stage_of_users(inputs, fixed)
            else:
                fixed = self._stage_of_tensors(inputs, lowest)
            fixed = self._stage_of_held(inputs, fixed)
        if after < 0:  # with what the stage has computed last, so that gradients add up in that order
            after = self.latest - (self.latest - fixed) % self._num_stages
        return self._next(max(after, self._begins), fixed)

    def home(self, value: Any) -> int:
        """The visit that makes a value."""
        return max(self.visits.get(value, 0), 0)

    def last_read(self, value: int) -> int:
        """The latest visit that has read a value's memory."""
        return self._uses_of(value).read

    def note(self, event: Event) -> None:
        """Take in an event that has been placed."""
        visit = event.visit
        self.end = event
        if visit < 0 and event.function is MICROBATCHES_MEET:
            self._begins = self.latest = self._next_lap()
            return
        if visit >= 0:
            self.views.note(event)
        self.latest = max(self.latest, visit)
        for value in event.inputs:
            if type(value) is int:
                self._uses_of(value).read = max(self._uses_of(value).read, visit)
                if value < 0:
                    self._first_uses.setdefault(value, visit)
        self.memory.note(event)
        for value in event.made():
            self.visits[value] = visit
        for slot, _, _ in event.writes:
            if type(event.inputs[slot]) is int:
                uses = self._uses_of(event.inputs[slot])
                uses.written = max(uses.written, visit)

    def _next_lap(self) -> int:
        """The first visit of the first stage that nothing has run on."""
        has_run = max(self.visits.values(), default=-1) >= self._begins or self.latest > self._begins
        return (self.latest // self._num_stages + 1) * self._num_stages if has_run else self._begins

    def _in_part(self, visit: int) -> int:
        """A visit, or the first one of its stage since micro-batches have met."""
        return visit if visit < 0 or visit >= self._begins else self._begins + visit % self._num_stages

    def _ready(self, value: int) -> int:
        """The visit after which a value is there; -1 from the beginning."""
        return max(self.visits.get(value, -1), self._uses_of(value).written)

    def _needed(self, value: Any) -> int:
        """The visit that an event has to come after, or be on, for an input."""
        if isinstance(value, EarlierValue):
            return value.visit
        if not isinstance(value, HookTensor):
            return self._ready(value)
        # It may be a view of a buffer, into which a stage of its rank has written since.
        is_in_order = len(value.ranks) > 1 or len(value.stages) == 1
        return -1 if is_in_order else self._last_visit_of(value.stages)

    def _last_visit_of(self, stages: Iterable[int]) -> int:
        """The latest visit of some stages that the step has come to; -1 for none."""
        return max((self.latest - (self.latest - stage) % self._num_stages for stage in stages), default=-1)

    def _next(self, after: int, stage: int) -> int:
        """The first visit of `stage` from `after` on."""
        return after + (stage - after) % self._num_stages

    def _stage_of_tensors(self, inputs: Sequence[Any], lowest: int) -> int:
        """Of an event that takes the module's tensors alone: that of one which is held somewhere, else where the step
        has come to."""
        stages = []
        for value in inputs:
            if type(value) is int and value < 0:
                number = -1 - value
                held, holders = self._tensors.homes[number], self._tensors.holders[number]
                has_gradient = torch.is_grad_enabled() and self._tensors.tensors[number].requires_grad
                if held is None and holders:
                    # Weights alone take part where they have last: gradients of their uses add up in that order.
                    held = min(holders) if CAPTURED in inputs or not has_gradient else self._latest_of(holders)
                if held is not None:
                    if not has_gradient:
                        return held
                    stages.append(held)
                # Another batch tensor for the same layer:
                elif not stages and CAPTURED in inputs and value in self._first_uses:
                    return self._first_uses[value] % self._num_stages
        if stages:
            return max(stages)  # gradients then go back to earlier stages, and add up there in time
        if any(isinstance(value, HookTensor) for value in inputs):
            return lowest
        return max(self.latest % self._num_stages, lowest)

    def _latest_of(self, stages: Iterable[int]) -> int:
        """Of some stages, the one that the step has come to last; the first one if it has come to none."""
        return min(stages, key=lambda stage: (self.latest < stage, (self.latest - stage) % self._num_stages, stage))

    @staticmethod
    def _stage_of_held(inputs: Sequence[Any], lowest: int) -> int:
        """The first stage from `lowest` on that has what was made in a hook."""
        for value in inputs:
            if isinstance(value, HookTensor):
                lowest = next((stage for stage in value.stages if stage >= lowest), lowest)
        return lowest

    def _stage_of_keys(self, inputs: Sequence[Any]) -> int:
        """The latest stage that a key gives one of the module's tensors, or a layer before its own; 0 without."""
        numbers = [-1 - value for value in inputs if type(value) is int and value < 0]
        homes = [(self._tensors.homes[number], self._tensors.lowest[number]) for number in numbers]
        return max((lowest if home is None else home for home, lowest in homes), default=0)

    def _stage_of_users(self, inputs: Sequence[Any], lowest: int) -> int:
        """From `lowest` on, the first stage that has used all of the module's tensors without a key among the inputs,
        as a head on the stage of the last layer that ran; `lowest` without."""
        for value in inputs:
            if type(value) is int and value < 0 and self._tensors.homes[-1 - value] is None:
                later = [stage for stage in self._tensors.holders[-1 - value] if stage >= lowest]
                lowest = min(later, default=lowest)
        return lowest

    def _uses_of(self, value: int) -> _Uses:
        return self._uses.setdefault(self.memory.of(value), _Uses())


class _Uses:
    """Of memory: the latest visit that has read it, and that has written it."""

    __slots__ = ("read", "written")

    def __init__(self) -> None:
        self.read = self.written = -1
