"""What a step writes into tensors of the module, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.inference import writes_beside
from lightning_pipeline.recording.views import Memory


def needs_order(events: Iterable[Event], num_stages: int) -> bool:
    """Whether a micro-batch has to be done with before the next one begins: it writes into a tensor of the module that
    several stages use, or whose content before backward needs."""
    memory = Memory()
    written: set[int] = set()
    written_plainly: set[int] = set()
    stages: dict[int, set[int]] = {}
    with_gradient: set[int] = set()
    kept: set[int] = set()  # by batch norms, for backward, in which autograd does not mind what they write themselves
    for event in events:
        if event.visit < 0:
            continue
        beside = writes_beside(event.function, event.call)
        has_gradient = any(isinstance(spec, TensorSpec) and spec.requires_grad for spec in event.result.tensors)
        for slot, value in enumerate(event.inputs):
            number = memory.module_tensor(value)
            if number is not None:
                stages.setdefault(number, set()).add(event.visit % num_stages)
                if has_gradient:
                    (kept if slot in beside else with_gradient).add(number)
        written_now = memory.note(event).keys()
        written |= written_now
        if not beside:
            written_plainly |= written_now
    with_gradient |= kept & written_plainly
    return any(len(stages[number]) > 1 or number in with_gradient for number in written)


_REPLACING = ("copy_", "data.__set__")
"""Writes that do not look at what they write into."""


class Average(NamedTuple):
    """A tensor of the module that takes in a parameter, by their numbers, and where."""

    target: int
    source: int
    line: str


def average_in(events: Iterable[Event], tensors: Sequence[Tensor]) -> Average | None:
    """The first write into a tensor of the module of what is computed from it and a parameter of its shape, and from
    nothing of a batch.
    """
    memory = Memory()
    made_of: dict[int, frozenset[int]] = {}  # the module's tensors from which alone a value is computed
    for event in events:
        if event.visit < 0:
            continue
        memory.note(event)
        sources: list[frozenset[int]] = []
        for value in event.inputs:
            source = frozenset((-1 - value,)) if type(value) is int and value < 0 else made_of.get(value)
            if source is None:
                break
            sources.append(source)
        if len(sources) < len(event.inputs):
            continue
        together: frozenset[int] = frozenset().union(*sources)
        made_of.update((value, together) for value in event.outputs if value is not None)
        for slot, _, value in event.writes:
            made_of[value] = together
            target = memory.module_tensor(event.inputs[slot])
            if target is None:
                continue
            several = len(event.writes) if event.name.startswith("_foreach_") else 1  # each takes in those of its place
            taken = [one for other, one in enumerate(sources) if other != slot and other % several == slot % several]
            others: frozenset[int] = frozenset().union(*taken) - {target}
            alike = [other for other in sorted(others) if _is_parameter_like(tensors[other], tensors[target])]
            is_own_taken = event.name not in _REPLACING or any(target in one for one in taken)
            if alike and is_own_taken:
                return Average(target, alike[0], event.line)
    return None


def _is_parameter_like(tensor: Tensor, other: Tensor) -> bool:
    spec = TensorSpec.of(tensor)
    return spec.is_parameter and spec.shape == TensorSpec.of(other).shape
