"""What crosses the boundary after a stage: which values, and keeping these while the stage runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.absent import ValueId
from lightning_pipeline.partition.hooks import HookCall, note_calls
from lightning_pipeline.partition.record import Event
from lightning_pipeline.partition.tree import Slot

Kept = dict[ValueId, Tensor]


class Crossing:
    """Which values of a stage go to the next one. Made once for a structure of micro-batch; each of these keeps its
    own values, in a dictionary.

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
        self._passing = [value for value in values if value[0] < start]
        self._events = events
        self._modules = modules
        self._wanted: dict[int, list[int]] = {}
        for event, index in values:
            if event >= start:
                self._wanted.setdefault(event, []).append(index)
        self._plain = {event for event, wanted in self._wanted.items() if _is_its_result(events[event], wanted)}

    def __contains__(self, number: int) -> bool:
        """Whether a value of event `number` crosses."""
        return number in self._wanted

    def watch(self, number: int, calls: list[HookCall]) -> Sequence[Any]:
        """Before event `number`: have calls of hooks inside the leaf noted in `calls`; returns handles to remove."""
        hooked = self._events[number].hooked
        return (
            note_calls(((name, self._modules[name]) for name in {name for name, _ in hooked}), calls) if hooked else ()
        )

    def keep(
        self, kept: Kept, number: int, result: Any, args: Any, kwargs: Any, calls: Sequence[HookCall] = ()
    ) -> None:
        """After event `number`: keep its values that cross."""
        if number in self._plain and type(result) is Tensor:
            kept[number, 0] = result
            return
        with torch._C.DisableTorchFunction():
            found = self._found(self._events[number], result, args, kwargs, calls)
        for index in self._wanted[number]:
            kept[number, index] = found[index]

    def pass_through(self, kept: Kept, places: dict[ValueId, Tensor]) -> None:
        """When the stage begins: keep the values of earlier stages that cross."""
        for value in self._passing:
            kept[value] = places[value]

    def outputs(self, kept: Kept) -> Kept:
        """All values that cross, in order; the stage is over."""
        return {value: kept[value] for value in self._values}

    def _found(self, event: Event, result: Any, args: Any, kwargs: Any, calls: Sequence[HookCall]) -> list[Tensor]:
        """The tensors of the event, in the order of their numbers."""
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
        return found


def _is_its_result(event: Event, wanted: list[int]) -> bool:
    """Whether the value that is wanted of an event is the tensor that it returned."""
    return wanted == [0] and isinstance(event.layout, Slot) and not event.has_side_effects
