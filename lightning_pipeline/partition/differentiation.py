"""Gradients that a step asks for itself: over which visits they go, and what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.event import Event
from lightning_pipeline.partition.execution import run_event, values_made
from lightning_pipeline.partition.inference import NOTHING, Inference, Result
from lightning_pipeline.partition.operation import Call, put_together
from lightning_pipeline.partition.placeholder import Look


class Graph:
    """What some values of a recording were computed from.

    Args:
        end: the last event so far.
        captured: what the recording has taken along.
        outputs: numbers of the values.
    """

    def __init__(self, end: Event, captured: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._captured = captured
        self._homes: dict[int, int] = {}
        self._outputs = [value for value in outputs if type(value) is int and value >= 0]
        self._before: list[Event] = []  # in order
        needed: set[Any] = set(self._outputs)
        for event in reversed(end.path()):
            made = event.made()
            self._homes.update(dict.fromkeys(made, event.visit))
            if event.visit >= 0 and not needed.isdisjoint(made):
                self._before.append(event)
                needed.update(
                    value
                    for value, look in zip(event.inputs, event.looks, strict=True)
                    if type(value) is int and value >= 0 and look.requires_grad
                )
        self._before.reverse()

    def visits(self, wanted: Sequence[tuple[Any, Tensor]] | None) -> dict[int, list[int]]:
        """The visits of what leads from `wanted` (all leaves, for None) to the outputs, each with the numbers of the
        module's tensors that take part in it there."""
        found: dict[int, list[int]] = {self._homes.get(value, 0): [] for value in self._outputs}
        reached = {value for value, _ in wanted or () if type(value) is int}
        leaves = [tensor for value, tensor in wanted or () if value is None]
        for event in self._before:
            if not event.gives_gradients():
                continue
            is_on_way = wanted is None or not reached.isdisjoint(event.inputs)
            for slot, place in event.matcher.captured_tensors.items():
                captured = self._captured[event.first_captured + place]
                is_on_way |= event.inputs[slot] is None and any(captured is leaf for leaf in leaves)
            if is_on_way:
                reached.update(event.made())
                own = found.setdefault(event.visit, [])
                own += [-1 - value for value in event.inputs if type(value) is int and value < 0]
        return found

    def result(
        self,
        visit: int,
        function: Any,
        call: Call,
        inputs: Sequence[Any],
        looks: Sequence[Look],
        inference: Inference,
    ) -> Result:
        """What a call of autograd gives, found out on a graph of fake tensors."""
        if function is not torch.autograd.grad:
            return NOTHING
        fakes: dict[Any, Tensor] = {}

        def fake(value: Any, look: Look, captured: Any = None) -> Tensor:
            key = value if value is not None else ("captured", id(captured))
            if key not in fakes:
                fakes[key] = inference.fake(look)
            return fakes[key]

        with inference.mode:
            for event in self._before:
                if event.visit != visit:
                    continue
                operands = []
                for slot, (value, look) in enumerate(zip(event.inputs, event.looks, strict=True)):
                    place = event.matcher.captured_tensors.get(slot)
                    captured = None if place is None else self._captured[event.first_captured + place]
                    operands.append(fake(value if type(value) is int else None, look, captured))
                found = run_event(event, operands, self._captured, lambda number: None)
                fakes.update(values_made(event, operands, found))
            own = [
                fake(value if type(value) is int else None, look, tensor)
                for value, look, tensor in zip(inputs, looks, call.tensors, strict=True)
            ]
            kwargs = put_together(call.kwargs, own, call.numbers)
            found = function(*put_together(call.args, own, call.numbers), **kwargs)
        made, layout = tree.flatten(found)
        return Result(layout, tuple(Look.of(tensor) for tensor in made), tuple(() for _ in made), ())
