"""Keeping what crosses the boundary after a stage, and nothing else, while the stage runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.absent import ValueId
from lightning_pipeline.partition.hooks import HookCall, note_calls
from lightning_pipeline.partition.record import Event


class Crossing:
    """Values of a stage that go to the next one.

    Args:
        values: these values, in order; those of events before `start` only pass through.
        start: the event with which the stage begins.
        events: the events of the step, this stage's included.
        modules: modules by name, for values that arise inside of leaves.
    """

    def __init__(
        self, values: tuple[ValueId, ...], start: int, events: list[Event], modules: dict[str, nn.Module]
    ) -> None:
        self._values = values
        self._start = start
        self._events = events
        self._modules = modules
        self._tensors: dict[ValueId, Tensor] = {}
        self._wanted: dict[int, list[int]] = {}
        for event, index in values:
            if event >= start:
                self._wanted.setdefault(event, []).append(index)

    def __contains__(self, number: int) -> bool:
        """Whether a value of event `number` crosses."""
        return number in self._wanted

    def watch(self, number: int, calls: list[HookCall]) -> Sequence[Any]:
        """Before event `number`: have calls of hooks inside the leaf noted in `calls`; returns handles to remove."""
        hooked = {module for module, _ in self._events[number].hooked} if number in self._wanted else ()
        return note_calls(((name, self._modules[name]) for name in hooked), calls) if hooked else ()

    def keep(self, number: int, result: Any, args: Any, kwargs: Any, calls: Sequence[HookCall] = ()) -> None:
        """After event `number`: keep its values that cross."""
        event = self._events[number]
        parts: list[Any] = [result]
        if event.filled:
            holders = list(tree.containers((args, kwargs)))
            parts += [holders[index] for index, _ in event.filled]
        parts += [getattr(self._modules[module], attribute) for module, attribute, _ in event.attributes]
        parts += [content for _, content in calls]
        found = tree.leaves(parts if len(parts) > 1 else result)
        if event.writes:
            arguments = tree.leaves((args, kwargs))
            found = [*found, *(arguments[index] for index in event.writes)]
        for index in self._wanted[number]:
            self._tensors[number, index] = found[index]

    def pass_through(self, places: dict[ValueId, Tensor]) -> None:
        """When the stage begins: keep the values of earlier stages that cross."""
        for value in self._values:
            if value[0] < self._start:
                self._tensors[value] = places[value]

    def outputs(self) -> dict[ValueId, Tensor]:
        """All values that cross, in order; the stage is over."""
        return {value: self._tensors[value] for value in self._values}
