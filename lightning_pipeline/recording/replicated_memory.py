"""The memory of tensors that every rank has: which of them share it, and which are copied for stages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_pipeline.partition.memory import is_view_of_kept, memory_of
from lightning_pipeline.partition.placeholder import Placeholder


class ReplicatedMemory:
    """Tensors that every rank has, in one recording, by the address of their memory.

    Stages run later than the step's Python. What the Python writes into such memory must not change what a stage has
    yet to use, and no other view of the memory may miss what a stage writes.

    Args:
        copied: memory of which recordings capture copies, as steps write into it.

    Attributes:
        batch: memory of the batch's tensors, which are parts of larger ones that no step sees.
        exposed: memory that numpy, or C code, shares.
        coming: views that become a stage's together with the tensor that is written into.
    """

    def __init__(self, copied: frozenset[int]) -> None:
        self.batch: set[int] = set()
        self.exposed: set[int] = set()
        self.copied = copied
        self.coming: Sequence[Tensor] = ()
        self._views: dict[int, list[weakref.ref[Tensor]]] = {}
        self._places: dict[int, list[int]] = {}  # of captured tensors, as far as they have been looked at
        self._num_looked_at = 0

    def note_batch(self, tensors: Iterable[Tensor]) -> None:
        by_memory: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if type(tensor) is not Placeholder:
                by_memory.setdefault(memory_of(tensor), []).append(tensor)
        self.batch.update(by_memory)
        for memory, sharing in by_memory.items():
            if len(sharing) > 1:
                self.note_views(memory, sharing)

    def note_views(self, memory: int, tensors: Iterable[Tensor]) -> None:
        self._views.setdefault(memory, []).extend(map(weakref.ref, tensors))

    def views_in_step(self, memory: int, base: Tensor) -> list[Tensor]:
        """The tensors that the step has made of this memory, but for `base`."""
        found = {id(one): one for reference in self._views.get(memory, ()) if (one := reference()) is not None}
        return [one for one in found.values() if one is not base]

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether a view or an array shares a tensor's memory and would miss what a stage writes into it."""
        memory = memory_of(tensor)
        known = {id(tensor), *map(id, self.coming)}
        others = [reference() for reference in self._views.get(memory, ())]
        has_view = any(other is not None and id(other) not in known for other in others)
        return memory in self.exposed or has_view or (memory not in self.batch and is_view_of_kept(tensor))

    def places_of(self, memory: int, captured: Sequence[Any]) -> list[int]:
        """The places of a memory's tensors among what has been captured."""
        self._look_at(captured)
        return self._places.get(memory, [])

    def captures_none_of(self, memories: set[int], captured: Sequence[Any]) -> bool:
        """Whether nothing that has been captured is in any of these."""
        self._look_at(captured)
        return memories.isdisjoint(self._places)

    def _look_at(self, captured: Sequence[Any]) -> None:
        for place in range(self._num_looked_at, len(captured)):
            if isinstance(captured[place], Tensor):
                self._places.setdefault(memory_of(captured[place]), []).append(place)
        self._num_looked_at = len(captured)

    def forget_places(self, memory: int) -> None:
        """Forget the captured tensors of a memory, which have become copies."""
        self._places.pop(memory, None)
