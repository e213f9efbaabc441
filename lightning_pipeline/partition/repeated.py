"""Checkpointed functions whose events run one by one, and run again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_pipeline.partition.event import Event
from lightning_pipeline.partition.execution import run_event, values_made
from lightning_pipeline.partition.recomputed import Frame


class Repeated:
    """The events of a checkpointed function on one visit, which run again in backward.

    Args:
        captured: what the recording has taken along.
        seed: starts the random numbers of a draw.
    """

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

    def _again(self, *inputs: Tensor) -> None:
        values = {value: inputs[place] for value, place in self._places.items()}
        for event, others in self._events:
            operands = [
                values[value] if tensor is None else tensor for value, tensor in zip(event.inputs, others, strict=True)
            ]
            found = run_event(event, operands, self._captured, self._seed)
            values.update(values_made(event, operands, found))
