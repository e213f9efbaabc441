"""Moving averages of weights that a step takes, and with it each of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_pipeline.partition.event import Event
from lightning_pipeline.partition.module_writes import ModuleWrites
from lightning_pipeline.partition.placeholder import Look

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

    Args:
        tensors: the module's, by number.
    """
    writes = ModuleWrites()
    made_of: dict[int, frozenset[int]] = {}  # the module's tensors from which alone a value is computed
    for event in events:
        if event.visit < 0:
            continue
        writes.of(event)
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
            target = writes.behind(event.inputs[slot])
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
    look = Look.of(tensor)
    return look.is_parameter and look.shape == Look.of(other).shape
