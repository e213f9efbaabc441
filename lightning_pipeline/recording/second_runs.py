"""Checkpointed functions that several backwards of a step go through.

One process runs such a function again in each of them; stages compute its events again once, and keep what comes of it
until the graph is freed. The same, but for what the function changes::

    forward                          batch norm: 1 batch      self.calls = 1
    backward, retain_graph=True      batch norm: 2 batches    self.calls = 2
    backward                         batch norm: 3 batches    self.calls = 3     on stages: 2 batches

So these are errors. What a function changes of Python comes right where each is a whole backward (`python_again`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline.partition.torch_functions import function_name
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.autograd_calls import Graph
from lightning_pipeline.recording.event import MICROBATCHES_MEET, Event, checkpointed
from lightning_pipeline.recording.operation import TensorSlot

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


class _Backward(NamedTuple):
    """One that goes back from `outputs`, to what `wanted` are (None for all)."""

    event: Event
    outputs: list[Any]
    wanted: list[Any] | None


def refuse_second_runs(recording: Recording, value: int) -> None:
    """Refuse a backward from `value` through a checkpointed function that changes something, if an earlier one has gone
    through it.
    """
    path = recording.event.path()
    regions = [path[begins : ends + 1] for begins, ends in checkpointed(path)]
    earlier = list(_backwards(path)) if regions else []
    if not earlier:
        return
    now = Graph(recording.event, recording.captured, [value])
    for events in regions:
        written = [
            recording.tensors.names[-1 - number][0]
            for event in events
            for slot, _, _ in event.writes
            if type(number := event.inputs[slot]) is int and number < 0
        ]
        calls = recording.checkpoints.changing_calls
        changed = [name for one in calls if one.begins is events[0] for name in one.changed]
        for one in earlier if written or changed else ():
            if not Graph(one.event, recording.captured, one.outputs).leading(events, one.wanted):
                continue
            is_grad = one.wanted is not None
            if (written and now.leading(events)) or (changed and is_grad):
                how = "torch.autograd.grad" if is_grad else "an earlier backward"
                raise CheckpointError(
                    f"{how} ({one.event.line}) goes through the checkpointed function called at {events[0].line}, and "
                    f"so does the backward at {users_line()}: in each of them it would change "
                    f"{(written or changed)[0]} once more. Call it without the checkpoint, or change that outside of it"
                )


def _backwards(path: Sequence[Event]) -> Iterator[_Backward]:
    for event in path:
        if event.visit < 0:
            if event.function is MICROBATCHES_MEET and event.call.args[1] >= 0:
                yield _Backward(event, [event.call.args[1]], None)
        elif event.function is torch.autograd.grad or function_name(event.function) == "backward":
            args, kwargs = event.call.args, event.call.kwargs
            outputs = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
            wanted = None
            if event.function is torch.autograd.grad:
                wanted = _values(event, args[1] if len(args) > 1 else kwargs["inputs"])
            yield _Backward(event, _values(event, outputs), wanted)


def _values(event: Event, template: Any) -> list[Any]:
    """What the tensors of an argument stand for."""
    if isinstance(template, TensorSlot):
        return [event.inputs[template.number]]
    return [value for one in template for value in _values(event, one)] if isinstance(template, (list, tuple)) else []
