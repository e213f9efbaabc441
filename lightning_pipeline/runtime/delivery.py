"""Batch delivery: the first rank gives each other rank the tensors of the batch that its stages use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_pipeline.partition.absent import Absent, ValueMeta
from lightning_pipeline.partition.replay import BATCH
from lightning_pipeline.runtime.structure import Structure
from lightning_pipeline.runtime.transport import Channel, PendingReceive, TensorMeta, Transport

Shapes = Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]]


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
        self._whole: dict[int, PendingReceive] | None = None
        self._columns: list[Sequence[Tensor] | None] = []
        self._pending: dict[int, dict[int, PendingReceive]] = {}
        self._there: dict[int, list[Tensor | None]] = {}

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
        shapes = batch_shapes(structure)
        pending = self._pending[microbatch] = {}
        for index in _used(structure, self._rank):
            shape, stride, dtype, _ = shapes[index]
            meta = TensorMeta.of(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
            pending[index] = self._transport.recv(meta, 0, Channel.BATCH)

    def take(self, microbatch: int, stage: int) -> list[Tensor]:
        """A micro-batch's tensors for one of this rank's stages, absent ones where the rank has no use for them."""
        if self._tensors is not None:
            tensors: Sequence[Tensor | None] = self._tensors[microbatch]
        else:
            tensors = self._arrived(microbatch, f"the batch of micro-batch {microbatch} ({stage}F{microbatch})")
        if stage == self._last:
            self._let_go(microbatch)
        else:  # what a stage does to a tensor's object must not be seen by the next one
            tensors = [tensor.detach() if tensor is not None else None for tensor in tensors]
        return [
            tensor if tensor is not None else self._absent(microbatch, index) for index, tensor in enumerate(tensors)
        ]

    def _absent(self, microbatch: int, index: int) -> Absent:
        """Stands for a tensor that is not here."""
        meta = ValueMeta(*batch_shapes(self._structures[microbatch])[index])
        return Absent.make(meta, self._device, (BATCH, index), f"the batch (tensor {index})")

    def _arrived(self, microbatch: int, what: str) -> Sequence[Tensor | None]:
        """A micro-batch's tensors on a rank that gets them, None where it has no use for one."""
        if self._whole is not None:
            if not self._columns:
                self._columns = [self._parts(index, what) for index in range(len(batch_shapes(self._structures[0])))]
            return [parts[microbatch] if parts is not None else None for parts in self._columns]
        if microbatch not in self._there:
            pending, self._pending[microbatch] = self._pending[microbatch], {}
            there = {index: receive.wait(what) for index, receive in pending.items()}
            count = len(batch_shapes(self._structures[microbatch]))
            self._there[microbatch] = [there.get(index) for index in range(count)]
        return self._there[microbatch]

    def _let_go(self, microbatch: int) -> None:
        if self._tensors is not None:
            self._tensors[microbatch] = []
        self._there.pop(microbatch, None)

    def _parts(self, index: int, what: str) -> Sequence[Tensor] | None:
        """The micro-batches' parts of a tensor that came whole."""
        assert self._whole is not None
        pending = self._whole.get(index)
        if pending is None:
            return None
        return pending.wait(what).split([batch_shapes(structure)[index][0][0] for structure in self._structures])


def batch_shapes(structure: Structure) -> Shapes:
    """Shape, strides, dtype and requires_grad of each tensor of the micro-batch."""
    return structure.key[1][1]  # type: ignore[index]


def whole_batch(structures: Sequence[Structure], rank: int) -> dict[int, tuple[tuple[int, ...], torch.dtype]] | None:
    """Shape and dtype of each tensor that `rank` uses, over all micro-batches; None where each travels by itself."""
    if not all(structure.settled for structure in structures):
        return None
    used = {tuple(_used(structure, rank)) for structure in structures}
    if len(used) > 1:
        return None
    layout = {}
    for index in used.pop():
        shapes = [batch_shapes(structure)[index] for structure in structures]
        shape, _, dtype, _ = shapes[0]
        if not shape or any((other[0][1:], other[2]) != (shape[1:], dtype) for other in shapes):
            return None
        layout[index] = ((sum(other[0][0] for other in shapes), *shape[1:]), dtype)
    return layout


def _used(structure: Structure, rank: int) -> Iterable[int]:
    if structure.fixed:
        return structure.batch_of_rank[rank]
    return range(len(batch_shapes(structure)))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
