"""The values that a virtual stage receives from the one before and sends to the one after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_pipeline.partition.absent import ValueId
from lightning_pipeline.partition.received import Received
from lightning_pipeline.partition.record import Record
from lightning_pipeline.runtime.delivery import BatchDelivery
from lightning_pipeline.runtime.microbatch import Header, Here, Microbatch
from lightning_pipeline.runtime.routes import Channel
from lightning_pipeline.runtime.site import Site
from lightning_pipeline.runtime.structure import Structure
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.transport import Transport


class Activations:
    """Values on their way forward, of the micro-batches of one step.

    Where a structure is fixed both sides know what comes. Else a header goes first, with the record of the events so
    far and what the values look like.

    Args:
        site: the stage.
        transport: the connection to the other ranks; None with one.
        delivery: the rank's part of the batch, which the stage asks for along with its values.
        microbatches: the step's micro-batches, as this stage's own.
        training: whether gradients come back.
    """

    def __init__(
        self,
        site: Site,
        transport: Transport | None,
        delivery: BatchDelivery,
        microbatches: Sequence[Microbatch],
        *,
        training: bool,
    ) -> None:
        self._site = site
        self._transport = transport
        self._delivery = delivery
        self._microbatches = microbatches
        self._training = training

    def post(self, microbatch: int) -> bool:
        """Post the receives of a micro-batch's inputs, if their sizes are known."""
        state = self._microbatches[microbatch]
        if not state.structure.fixed:
            return False
        self._delivery.post(microbatch)
        self._post_values(state, state.structure.boundary(self._site.stage - 1).values)
        return True

    def receive(self, microbatch: int) -> None:
        """Where the structure is not fixed, read the header and post the receives that it announces."""
        state = self._microbatches[microbatch]
        if state.structure.fixed:
            return
        assert self._transport is not None
        self._delivery.post(microbatch)
        what = f"the record of micro-batch {microbatch} ({self._site.stage}F{microbatch})"
        header: Header = self._transport.recv_object(self._site.rank_before, what)
        state.header = header
        state.gradients_in = header.gradients
        _note_metas(state, header)
        self._post_values(state, [(value, meta) for value, meta, _ in header.values])

    def take(self, state: Microbatch) -> Received:
        """A micro-batch's inputs, once they are there."""
        values: dict[ValueId, Tensor] = {}
        pending, state.pending_values = state.pending_values, []
        if pending:
            what = f"the activations of micro-batch {state.index} ({self._site.stage}F{state.index})"
            for value, arriving in pending:
                values[value] = arriving.wait(what)
        if state.header is not None:
            return Received(values, {value for value, _, required in state.header.values if required})
        if not values:
            return Received(values, ())
        return Received(values, state.structure.boundary(self._site.stage - 1).requires_grad)

    def send(self, microbatch: int) -> None:
        """Send what crosses the boundary after the stage."""
        state = self._microbatches[microbatch]
        assert self._transport is not None
        structure, peer = state.structure, self._site.rank_after
        if structure.fixed:
            for value, meta in structure.boundary(self._site.stage).values:
                tensor = conform(state.outputs[value], meta, structure, self._site.stage, value)
                self._transport.send(tensor, peer, Channel.FORWARD)
        else:
            header = _header(state)
            self._transport.send_object(header, peer)
            for tensor in state.outputs.values():
                self._transport.send(tensor, peer, Channel.FORWARD)
            _note_metas(state, header)
        self._keep_edges(state)

    def hand_on(self, state: Microbatch, following: Microbatch) -> None:
        """Give the next stage, on this same rank, what crosses the boundary."""
        if not state.structure.fixed:
            header = _header(state)
            record = header.record
            header.record = Record(list(record.events), dict(record.starts), dict(record.counts))
            following.header = header
            _note_metas(state, header)
            following.metas = dict(state.metas)
        # Copies, as over a connection: the next stage may write into what it receives, and this one's graph needs it.
        following.pending_values = [(value, Here(tensor.detach().clone())) for value, tensor in state.outputs.items()]
        self._keep_edges(state)

    # -- details ----------------------------------------------------------------------------------------------------

    def _post_values(self, state: Microbatch, values: Iterable[tuple[ValueId, TensorMeta]]) -> None:
        transport, peer = self._transport, self._site.rank_before
        assert transport is not None
        for value, meta in values:
            state.pending_values.append((value, transport.recv(meta, peer, Channel.FORWARD)))

    def _keep_edges(self, state: Microbatch) -> None:
        """Keep of the outputs what backward needs: their places in the graph, not their data."""
        if self._training:
            structure = state.structure
            wanted = structure.gradients[self._site.stage] if structure.fixed else state.gradients_out
            for value, tensor in state.outputs.items():
                if tensor.requires_grad and (wanted is None or value in wanted):
                    state.edges[value] = get_gradient_edge(tensor)
        state.outputs = {}


def conform(tensor: Tensor, meta: TensorMeta, structure: Structure, stage: int, value: ValueId) -> Tensor:
    """`tensor` with the strides that the receiver made room for.

    Raises:
        RuntimeError: it has another shape or dtype.
    """
    if tensor.stride() == meta.stride and tensor.shape == meta.shape and tensor.dtype == meta.dtype:
        return tensor
    found = TensorMeta.of(tensor)
    if found == meta:
        return tensor
    if found.shape != meta.shape or found.dtype != meta.dtype:
        name = structure.records[stage].events[value[0]].name
        raise RuntimeError(
            f"the result of {name!r} is {list(found.shape)} {found.dtype} and was {list(meta.shape)} {meta.dtype} "
            f"for the first micro-batch of this structure; a shape that depends on data cannot cross a boundary "
            f"unseen: move the boundary, or pad the value"
        )
    made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def _note_metas(state: Microbatch, header: Header) -> None:
    for value, meta, requires_grad in header.values:
        state.structure.metas[value] = (meta, requires_grad)
        state.metas[value] = meta


def _header(state: Microbatch) -> Header:
    assert state.observer is not None
    values = []
    storages: dict[int, list[ValueId]] = {}
    for value, tensor in state.outputs.items():
        values.append((value, TensorMeta.of(tensor), tensor.requires_grad))
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(value)
    groups = {value: number for number, group in enumerate(storages.values()) if len(group) > 1 for value in group}
    return Header(state.observer.record, values, groups, state.gradients_out)
