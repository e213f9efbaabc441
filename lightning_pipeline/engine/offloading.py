"""Activations of waiting micro-batches in host memory: what is sent, when it moves, and what stays on the device.

``schedules.offloading`` chooses whose activations wait there. Their moves stand between a rank's actions::

    0F4  send  0B1  settle  0F5  0B2  0F6  0B3  fetch  0F7  arrive  0B4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pipeline import _torch
from lightning_pipeline.recording.saved_tensors import Block, HostMemory, SavedMemory, memories_of
from lightning_pipeline.schedules import Action, Kind
from lightning_pipeline.schedules.offloading import away_in, by_place


class Move(NamedTuple):
    """A method of `WaitingActivations` that is called between actions."""

    method: str
    stage: int
    microbatch: int


def with_moves(actions: Sequence[Action], *, sends: bool) -> list[Action | Move]:
    """A rank's actions, sends and receives included, with the moves to host memory and back among them.

    Args:
        sends: whether anything moves; else what is saved is only counted.
    """
    away = away_in([action for action in actions if action.kind.is_compute]) if sends else []
    before = [
        (method, by_place(away, place)) for method, place in (("settle", "gone"), ("fetch", "back"), ("arrive", "used"))
    ]
    sent = {(one.stage, one.microbatch) for one in away}
    found: list[Action | Move] = []
    waiting: Move | None = None
    place = 0
    for action in actions:
        # A send of the outputs goes first: the next stage waits for it.
        if waiting is not None and action.kind is not Kind.SEND_F:
            found.append(waiting)
            waiting = None
        if action.kind.is_compute:
            for method, of_place in before:
                found += [Move(method, one.stage, one.microbatch) for one in of_place.get(place, ())]
            place += 1
        found.append(action)
        if action.kind is Kind.F:
            key = action.stage, action.microbatch
            waiting = Move("send_away" if key in sent else "note_saved", *key)
    return found if waiting is None else [*found, waiting]


class Offload:
    """Sends saved tensors of this rank to host memory, and counts their bytes.

    Args:
        share: of a virtual stage's bytes, the most that is sent; 0 only counts.

    Attributes:
        may_measure: whether the bytes of observed steps are counted, which takes a look at everything that is saved.
        measures: whether those of this step are.
        peak_bytes: the most bytes that saved tensors took on the device in the step, where that is counted.
        kept: the most bytes that each virtual stage of this rank saved of a micro-batch, where they are counted.
        sent: those that went to host memory.
    """

    def __init__(self, share: float, device: torch.device) -> None:
        self.share = share
        self.may_measure, self.measures = True, False
        self.peak_bytes = 0
        self.kept: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self._memory = HostMemory(device)
        self._held: set[int] = set()
        self._live: list[tuple[_torch.StorageWeakRef, int]] = []

    def begin(self, module_tensors: Iterable[Tensor], *, is_observed: bool) -> None:
        self.measures = self.may_measure and is_observed
        self.peak_bytes, self.kept, self.sent, self._live = 0, {}, {}, []
        if not (self.measures or self.share):
            return
        # Each step anew, as parameters that are sharded over replicas have other memory in each.
        self._held = {memory for tensor in module_tensors for memory in memories_of(tensor)}

    def note(self, stage: int, roots: Iterable[Node], held: Iterable[Tensor]) -> SavedMemory:
        """Look at what a micro-batch's graph has saved.

        Args:
            held: tensors that somebody besides the graph refers to.
        """
        saved = SavedMemory(roots, self._held.union(memory for tensor in held for memory in memories_of(tensor)))
        if self.measures:
            sizes = {**saved.sizes, **saved.staying}
            self.kept[stage] = max(self.kept.get(stage, 0), sum(sizes.values()))
            self._live += ((ref, sizes[memory]) for memory, ref in saved.refs.items())
            self._measure()
        return saved

    def send(self, stage: int, saved: SavedMemory) -> dict[int, Block]:
        """Begin to copy what a micro-batch has saved to host memory. Returns it, by memory on the device."""
        blocks = saved.send(self.share, self._memory)
        self.sent[stage] = sum(saved.sizes[memory] for memory in blocks)
        return blocks

    def fetch(self, blocks: Iterable[Block]) -> None:
        back = [block.fetch() for block in blocks]
        if self.measures:
            self._live += ((_torch.StorageWeakRef(memory), memory.nbytes()) for memory in back)
            self._measure()

    def _measure(self) -> None:
        self._live = [(ref, size) for ref, size in self._live if not ref.expired()]
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live))
