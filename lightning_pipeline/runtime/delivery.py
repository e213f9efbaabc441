"""Batch delivery: the first rank gives each other rank the tensors of the batch that its stages use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_pipeline.partition.absent import Absent
from lightning_pipeline.partition.replay import BATCH
from lightning_pipeline.runtime.microbatch import Arriving
from lightning_pipeline.runtime.routes import Channel
from lightning_pipeline.runtime.structure import Structure
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.transport import Transport


class BatchDelivery:
    """The batch of one step, on one rank.

    Where all micro-batches use the same tensors, and these fit together, each travels whole, in one message; else each
    micro-batch's part travels by itself. Both sides decide by what they know alike.

    Args:
        structures: each micro-batch's structure.
        tensors: each micro-batch's tensors on the first rank; None on the others.
        stages: this rank's virtual stages, ascending.
    """

    def __init__(
        self,
        structures: Sequence[Structure],
        tensors: list[list[Tensor]] | None,
        transport: Transport | None,
        *,
        stages: Sequence[int],
        rank: int,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        self._structures = structures
        self._tensors = tensors
        self._transport = transport
        self._last = stages[-1]
        self._rank = rank
        self._peers = range(1, num_ranks)
        self._device = device
        self._sent_whole: dict[int, bool] = {}
        self._whole: dict[int, Arriving] | None = None
        self._pending: dict[int, dict[int, Arriving]] = {}
        self._there: dict[int, Sequence[Tensor | None]] = {}

    def begin(self) -> None:
        """Before the schedule: send, or make room for, what travels whole."""
        if self._transport is None:
            return
        if self._tensors is None:
            layout = whole_batch(self._structures, self._rank)
            if layout is not None:
                self._whole = {
                    index: self._transport.recv(TensorMeta(shape, _strides(shape), dtype), 0, Channel.BATCH)
                    for index, (shape, dtype) in layout.items()
                }
            return
        for peer in self._peers:
            layout = whole_batch(self._structures, peer)
            self._sent_whole[peer] = layout is not None
            for index in layout or ():
                parts = torch.cat([tensors[index] for tensors in self._tensors])
                self._transport.send(parts, peer, Channel.BATCH)

    def send(self, microbatch: int) -> None:
        """On the first rank, when a micro-batch's turn comes: send the others their parts of it."""
        if self._transport is None or self._tensors is None:
            return
        for peer in self._peers:
            if not self._sent_whole[peer]:
                for index in _used(self._structures[microbatch], peer):
                    self._transport.send(self._tensors[microbatch][index], peer, Channel.BATCH)

    def post(self, microbatch: int) -> None:
        """On another rank: make room for a micro-batch's part, if that has not happened."""
        if self._whole is not None or self._tensors is not None or microbatch in self._pending:
            return
        assert self._transport is not None
        structure = self._structures[microbatch]
        pending = self._pending[microbatch] = {}
        for index in _used(structure, self._rank):
            look = structure.batch_metas[index]
            meta = TensorMeta.of(torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device="meta"))
            pending[index] = self._transport.recv(meta, 0, Channel.BATCH)

    def take(self, microbatch: int, stage: int) -> list[Tensor]:
        """A micro-batch's tensors for one of this rank's stages, absent ones where the rank has no use for them."""
        shared = stage != self._last  # what a stage does to a tensor's object must not be seen by the next one
        if self._tensors is not None:
            tensors = self._tensors[microbatch]
            if shared:
                return [tensor.detach() for tensor in tensors]
            self._tensors[microbatch] = []
            return tensors
        metas = self._structures[microbatch].batch_metas
        made: list[Tensor] = []
        for index, tensor in enumerate(self._arrived(microbatch, stage)):
            if tensor is None:
                absent = Absent.make(metas[index], self._device, (BATCH, index), f"the batch (tensor {index})")
                made.append(absent)
            else:
                made.append(tensor.detach() if shared else tensor)
        if not shared:
            self._there.pop(microbatch, None)
        return made

    def _arrived(self, microbatch: int, stage: int) -> Sequence[Tensor | None]:
        """A micro-batch's tensors on a rank that gets them, None where it has no use for one."""
        if microbatch not in self._there:
            what = f"the batch of micro-batch {microbatch} ({stage}F{microbatch})"
            if self._whole is not None:
                self._divide(what)
            else:
                pending, self._pending[microbatch] = self._pending[microbatch], {}
                there = {index: receive.wait(what) for index, receive in pending.items()}
                count = len(self._structures[microbatch].batch_metas)
                self._there[microbatch] = [there.get(index) for index in range(count)]
        return self._there[microbatch]

    def _divide(self, what: str) -> None:
        """Give each micro-batch its parts of what came whole."""
        assert self._whole is not None
        whole, self._whole = self._whole, {}
        nothing = [None] * len(self._structures)
        columns: list[Sequence[Tensor | None]] = []
        for index in range(len(self._structures[0].batch_metas)):
            if index in whole:
                sizes = [structure.batch_metas[index].shape[0] for structure in self._structures]
                columns.append(whole[index].wait(what).split(sizes))
            else:
                columns.append(nothing)
        self._there = {microbatch: [column[microbatch] for column in columns] for microbatch in range(len(nothing))}


def whole_batch(structures: Sequence[Structure], rank: int) -> dict[int, tuple[tuple[int, ...], torch.dtype]] | None:
    """Shape and dtype of each tensor that `rank` uses, over all micro-batches; None where each travels by itself."""
    kinds = list({structure.number: structure for structure in structures}.values())
    if not all(structure.settled for structure in kinds):
        return None
    used = {tuple(_used(structure, rank)) for structure in kinds}
    if len(used) > 1:
        return None
    layout = {}
    for index in used.pop():
        shape, _, dtype, _ = kinds[0].batch_metas[index]
        others = (structure.batch_metas[index] for structure in kinds)
        if not shape or any((other.shape[1:], other.dtype) != (shape[1:], dtype) for other in others):
            return None
        size = sum(structure.batch_metas[index].shape[0] for structure in structures)
        layout[index] = ((size, *shape[1:]), dtype)
    return layout


def _used(structure: Structure, rank: int) -> Iterable[int]:
    if structure.fixed:
        return structure.batch_of_rank[rank]
    return range(len(structure.batch_metas))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
