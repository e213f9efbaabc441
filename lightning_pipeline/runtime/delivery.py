"""Batch delivery: the first stage gives each other stage the tensors of the batch that it uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_pipeline.partition.absent import Absent, ValueMeta
from lightning_pipeline.partition.replay import BATCH
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.transport import Channel, PendingReceive, TensorMeta, Transport

Shapes = Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]]


class BatchDelivery:
    """The batch of one step, on one stage.

    Where all micro-batches use the same tensors, and these fit together, each travels whole, in one message; else each
    micro-batch's part travels by itself. Both sides decide by what they know alike.
    """

    def __init__(
        self,
        microbatches: list[Microbatch],
        transport: Transport | None,
        *,
        stage: int,
        num_stages: int,
        device: torch.device,
    ) -> None:
        self._microbatches = microbatches
        self._transport = transport
        self._stage = stage
        self._peers = range(1, num_stages)
        self._device = device
        self._sent_whole: dict[int, bool] = {}
        self._posted: dict[int, PendingReceive] | None = None
        self._whole: dict[int, Sequence[Tensor]] | None = None

    def begin(self) -> None:
        """Before the schedule: send, or make room for, what travels whole."""
        if self._transport is None:
            return
        if self._stage > 0:
            layout = whole_batch(self._microbatches, self._stage)
            if layout is not None:
                self._posted = {
                    index: self._transport.recv(TensorMeta(shape, _strides(shape), dtype), 0, Channel.BATCH)
                    for index, (shape, dtype) in layout.items()
                }
            return
        for peer in self._peers:
            layout = whole_batch(self._microbatches, peer)
            self._sent_whole[peer] = layout is not None
            for index in layout or ():
                parts = [state.tensors[index] for state in self._microbatches if state.tensors is not None]
                self._transport.send(torch.cat(parts), peer, Channel.BATCH)

    def send(self, state: Microbatch) -> None:
        """On the first stage, when a micro-batch's turn comes: send the others their parts of it."""
        if self._stage > 0 or self._transport is None:
            return
        assert state.tensors is not None
        for peer in self._peers:
            if not self._sent_whole[peer]:
                for index in _used(state, peer):
                    self._transport.send(state.tensors[index], peer, Channel.BATCH)

    def post(self, state: Microbatch) -> None:
        """On another stage: make room for a micro-batch's part."""
        if self._posted is not None:
            return
        assert self._transport is not None
        shapes = batch_shapes(state)
        for index in _used(state, self._stage):
            shape, stride, dtype, _ = shapes[index]
            meta = TensorMeta.of(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
            state.pending_batch.append((index, self._transport.recv(meta, 0, Channel.BATCH)))

    def take(self, state: Microbatch) -> list[Tensor]:
        """A micro-batch's tensors, absent ones where this stage has no use for them."""
        if state.tensors is not None:
            tensors, state.tensors = state.tensors, None
            return tensors
        what = f"the batch of micro-batch {state.index} ({self._stage}F{state.index})"
        if self._posted is not None:
            there = self._rows(state.index, what)
        else:
            there = {index: pending.wait(what) for index, pending in state.pending_batch}
            state.pending_batch = []
        return [
            there[index]
            if index in there
            else Absent.make(ValueMeta(*meta), self._device, (BATCH, index), f"the batch (tensor {index})")
            for index, meta in enumerate(batch_shapes(state))
        ]

    def _rows(self, microbatch: int, what: str) -> dict[int, Tensor]:
        """This micro-batch's part of each tensor that came whole."""
        assert self._posted is not None
        if self._whole is None:
            self._whole = {}
            for index, pending in self._posted.items():
                sizes = [batch_shapes(state)[index][0][0] for state in self._microbatches]
                self._whole[index] = pending.wait(what).split(sizes)
        return {index: parts[microbatch] for index, parts in self._whole.items()}


def batch_shapes(state: Microbatch) -> Shapes:
    """Shape, strides, dtype and requires_grad of each tensor of the micro-batch."""
    return state.structure.key[1][1]  # type: ignore[index]


def whole_batch(microbatches: list[Microbatch], stage: int) -> dict[int, tuple[tuple[int, ...], torch.dtype]] | None:
    """Shape and dtype of each tensor that `stage` uses, over all micro-batches; None where each travels by itself."""
    if not all(state.structure.settled for state in microbatches):
        return None
    used = {tuple(_used(state, stage)) for state in microbatches}
    if len(used) > 1:
        return None
    layout = {}
    for index in used.pop():
        shapes = [batch_shapes(state)[index] for state in microbatches]
        shape, _, dtype, _ = shapes[0]
        if not shape or any((other[0][1:], other[2]) != (shape[1:], dtype) for other in shapes):
            return None
        layout[index] = ((sum(other[0][0] for other in shapes), *shape[1:]), dtype)
    return layout


def _used(state: Microbatch, stage: int) -> Iterable[int]:
    if state.structure.fixed:
        return state.structure.batch[stage]
    return range(len(batch_shapes(state)))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
