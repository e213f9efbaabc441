"""The gradients that a virtual stage receives from the one after and sends to the one before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_pipeline.partition.absent import ValueId
from lightning_pipeline.runtime.activations import conform
from lightning_pipeline.runtime.microbatch import Here, Microbatch
from lightning_pipeline.runtime.routes import Channel
from lightning_pipeline.runtime.site import Site
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.transport import Transport


class ActivationGradients:
    """Gradients of values on their way back, of the micro-batches of one step.

    Where a structure is fixed both sides know which come. Else it may take the backward itself to find out, and then a
    list of them goes first.

    Args:
        site: the stage.
        transport: the connection to the other ranks; None with one.
        microbatches: the step's micro-batches, as this stage's own.
    """

    def __init__(
        self, site: Site, transport: Transport | None, microbatches: Sequence[Microbatch], device: torch.device
    ) -> None:
        self._site = site
        self._transport = transport
        self._microbatches = microbatches
        self._device = device

    def post(self, microbatch: int) -> bool:
        """Post the receives of the gradients, if it is known which will come."""
        state = self._microbatches[microbatch]
        if state.structure.fixed:
            self._post_gradients(state, state.structure.boundary(self._site.stage).gradients)
            return True
        if state.gradients_out is None or not state.metas.keys() >= set(state.gradients_out):
            return False
        self._post_gradients(state, [(value, state.metas[value]) for value in state.gradients_out])
        return True

    def receive(self, microbatch: int) -> None:
        """Where it is not known which gradients come, read which."""
        state = self._microbatches[microbatch]
        if state.pending_gradients is not None:
            return
        if state.gradients_out is not None:
            self._post_gradients(state, [(value, _meta(state, value)) for value in state.gradients_out])
            return
        assert self._transport is not None
        what = f"the list of gradients of micro-batch {microbatch} ({self._site.stage}B{microbatch})"
        self._post_gradients(state, self._transport.recv_object(self._site.rank_after, what))

    def take(self, state: Microbatch) -> tuple[list[GradientEdge], list[Tensor]]:
        """The places of a micro-batch's outputs in its graph, with the gradients there, once they have come."""
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        pending, state.pending_gradients = state.pending_gradients, None
        if pending:
            what = f"the gradients of micro-batch {state.index} ({self._site.stage}B{state.index})"
            for value, arriving in pending:
                gradient = arriving.wait(what)
                edge = state.edges.get(value)
                if edge is not None:
                    edges.append(edge)
                    gradients.append(gradient)
        state.edges = {}
        return edges, gradients

    def send(self, microbatch: int) -> None:
        """Send the gradients of what came from the stage before."""
        state = self._microbatches[microbatch]
        received, structure = state.received, state.structure
        assert self._transport is not None and received is not None
        peer = self._site.rank_before
        found, received.gradients = received.gradients, {}
        if not structure.fixed and state.gradients_in is None:
            self._transport.send_object([(value, TensorMeta.of(found[value])) for value in sorted(found)], peer)
            for value in sorted(found):
                self._transport.send(found[value], peer, Channel.BACKWARD)
        else:
            if structure.fixed:
                wanted: Iterable[tuple[ValueId, TensorMeta]] = structure.boundary(self._site.stage - 1).gradients
            else:
                wanted = [(value, _meta(state, value)) for value in state.gradients_in or ()]
            for value, meta in wanted:
                gradient = found.get(value)
                if gradient is None:
                    gradient = torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)
                gradient = conform(gradient, meta, structure, self._site.stage, value)
                self._transport.send(gradient, peer, Channel.BACKWARD)
        state.metas = {}

    def hand_back(self, state: Microbatch, preceding: Microbatch) -> None:
        """Give the stage before, on this same rank, the gradients of what came from it."""
        assert state.received is not None
        preceding.pending_gradients = [(value, Here(gradient)) for value, gradient in state.received.gradients.items()]
        state.received.gradients = {}

    def _post_gradients(self, state: Microbatch, values: Iterable[tuple[ValueId, TensorMeta]]) -> None:
        transport, peer = self._transport, self._site.rank_after
        assert transport is not None
        pending = state.pending_gradients = []
        for value, meta in values:
            pending.append((value, transport.recv(meta, peer, Channel.BACKWARD)))


def _meta(state: Microbatch, value: ValueId) -> TensorMeta:
    return state.metas[value] if state.metas else state.structure.metas[value][0]
