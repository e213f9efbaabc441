"""Checkpointed functions of a micro-batch that runs in order: which of their events are computed again, and how far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline.recording.event import CHECKPOINT_BEGINS, CHECKPOINT_ENDS, Event
from lightning_pipeline.recording.execution import run_event, values_made
from lightning_pipeline.recording.recomputation import Frame


class CheckpointedFunctions:
    """Follows the checkpointed functions of one micro-batch, event by event.

    Each visit computes its own part of a function again, when its backward needs it::

        function    visit 2: norm, linear      visit 4: tanh, linear      visit 2: a counter
        backward    visit 4: tanh, linear      visit 2: norm, linear, a counter

    Attributes:
        is_kept: the tensors of the function that runs are kept, as it takes gradients within.
    """

    def __init__(self, seed: Callable[[int], None]) -> None:
        self.is_kept = False
        self._seed = seed
        self._depth = 0
        self._stops_early = False
        self._kept: set[Event] = set()  # the beginnings of functions whose tensors are kept
        self._parts: dict[int, Repeated] = {}  # of the function that runs, by visit
        self._latest = 0  # visit of that function

    @property
    def runs(self) -> bool:
        """Whether events belong to a checkpointed function."""
        return self._depth > 0

    def note_gradients(self, todo: Sequence[Event]) -> None:
        """Take note of functions that take gradients within: their tensors are kept."""
        depth, begins = self._depth, None
        for event in todo:
            if event.visit < 0 and event.function is CHECKPOINT_BEGINS:
                begins = begins if depth else event
                depth += 1
            elif event.visit < 0 and event.function is CHECKPOINT_ENDS:
                depth -= 1
            elif depth and event.function is torch.autograd.grad:
                if begins is not None:
                    self._kept.add(begins)
                elif not self.is_kept:
                    raise CheckpointError(
                        f"a checkpointed function takes gradients by torch.autograd.grad ({event.line}) after it has "
                        f"read a value: read it after the gradients are taken, or outside of the function"
                    )

    def begin(self, event: Event) -> None:
        if not self._depth:
            self._stops_early = event.call.args[0]
            self.is_kept = event in self._kept
        self._depth += 1

    def note_visit(self, visit: int) -> None:
        """An event runs on a visit, on whichever rank."""
        if self._depth:
            self._latest = max(self._latest, visit)

    def part_of(self, visit: int, captured: Sequence[Any]) -> Repeated | None:
        """What a visit of this rank computes again; None outside of functions."""
        part = self._parts.get(visit)
        if self._depth and part is None and not self.is_kept:
            part = self._parts[visit] = Repeated(captured, self._seed, self._stops_early)
        return part

    def end(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        for visit, part in self._parts.items():
            if visit < self._latest:  # what the latest one needs comes after all of this one
                part.run_to_its_end()
        self._parts, self._latest = {}, 0


class Repeated:
    """The events of a checkpointed function on one visit, which run again in backward."""

    def __init__(self, captured: Sequence[Any], seed: Callable[[int], None], stops_early: bool) -> None:
        self._captured = captured
        self._seed = seed
        self._frame = Frame(self._again, stop_early=stops_early)
        self._places: dict[int, int] = {}  # of values that are not made here, among the frame's inputs
        self._made: set[int] = set()
        self._events: list[tuple[Event, list[Tensor | None]]] = []

    def run(self, event: Event, operands: Sequence[Tensor]) -> Any:
        """Run an event the first time."""
        others: list[Tensor | None] = []
        for value, tensor in zip(event.inputs, operands, strict=True):
            is_value = isinstance(value, int) and value >= 0
            others.append(None if is_value else tensor)
            if is_value and value not in self._made and value not in self._places:
                self._places[value] = self._frame.add_input(tensor)
        self._made.update(event.made())
        self._events.append((event, others))
        with self._frame.keeping_nothing():
            return run_event(event, operands, self._captured, self._seed)

    def run_to_its_end(self) -> None:
        """Do not stop early when computing again."""
        self._frame.stop_early = False

    def _again(self, *inputs: Tensor) -> None:
        values = {value: inputs[place] for value, place in self._places.items()}
        for event, others in self._events:
            operands = [
                values[value] if tensor is None else tensor for value, tensor in zip(event.inputs, others, strict=True)
            ]
            found = run_event(event, operands, self._captured, self._seed)
            values.update(values_made(event, operands, found))
