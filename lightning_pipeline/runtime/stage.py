"""A virtual stage's work on the micro-batches of a step: receive, run, send, and back."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.absent import ValueId
from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.observer import Observer
from lightning_pipeline.partition.received import Received
from lightning_pipeline.partition.record import Record
from lightning_pipeline.partition.replay import Replay
from lightning_pipeline.partition.split_backward import SplitBackward
from lightning_pipeline.runtime.delivery import BatchDelivery
from lightning_pipeline.runtime.microbatch import Header, Here, Microbatch
from lightning_pipeline.runtime.structure import Report, Structure
from lightning_pipeline.runtime.transport import Channel, TensorMeta, Transport
from lightning_pipeline.runtime.work import LiveCount, Work, stage_term


class Stage:
    """What a rank does with the micro-batches of one step on one of its virtual stages.

    Args:
        stage: the virtual stage, counted along the data.
        placement: the rank of each virtual stage.
        interception: the module's intercepted calls.
        transport: the connection to the other ranks; None with one.
        delivery: the rank's part of the batch.
        microbatches: the step's micro-batches, as this stage's own.
        live: the rank's count of live activations.
        template: a settled structure of the same kind of step, whose events a new structure is likely to share.

    Attributes:
        following: the next virtual stage, where it is on the same rank; set by the caller.
        preceding: the one before, likewise.
        ready_at: when the inputs of the last forward or backward were there (`time.perf_counter`).
    """

    def __init__(
        self,
        stage: int,
        placement: Sequence[int],
        *,
        device: torch.device,
        interception: Interception,
        transport: Transport | None,
        delivery: BatchDelivery,
        microbatches: list[Microbatch],
        work: Work,
        live: LiveCount,
        template: Structure | None,
    ) -> None:
        self.stage = stage
        self.last = stage == len(placement) - 1
        self.microbatches = microbatches
        self.reports: dict[int, Report] = {}
        self.following: Stage | None = None
        self.preceding: Stage | None = None
        self.ready_at = 0.0
        self._num_stages = len(placement)
        self._term = stage_term(placement)
        self._rank_before = placement[stage - 1]
        self._rank_after = placement[(stage + 1) % len(placement)]
        self._device = device
        self._interception = interception
        self._transport = transport
        self._delivery = delivery
        self._work = work
        self._training = work.loss_of is not None
        self._live = live
        self._template = template
        fixed = all(state.structure.fixed for state in microbatches)
        self._tensor_names = {} if fixed else interception.tensor_names()

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int) -> None:
        """Run the step of one micro-batch up to the end of this stage."""
        state = self.microbatches[microbatch]
        structure = state.structure
        fixed = structure.fixed
        if self.stage == 0:
            self._delivery.send(microbatch)
        state.received = received = self._take_values(state)
        batch = self._delivery.take(microbatch, self.stage)
        self.ready_at = time.perf_counter()
        record = structure.records[self.stage] if fixed else self._record_so_far(state)
        if not fixed:
            state.observer = self._observer(state, record)
        streams = self._interception.streams
        replay = Replay(
            stage=self.stage,
            num_stages=self._num_stages,
            device=self._device,
            streams=streams,
            record=record,
            received=received,
            batch=batch,
            crossing=structure.crossing[self.stage] if fixed and not self.last else (),
            observer=state.observer,
            modules=self._interception.modules,
            term=self._term,
        )
        value = tree.rebuild(state.layout, batch)
        streams.begin(state.seed, observing=not fixed)
        outcome = self._interception.run(replay, self._work.step, state, value)
        self._live.add()
        state.outputs = outcome.outputs
        if not fixed:
            streams.end_observed()
            self._finish_observation(state, outcome.passed)
        if self.last:
            if self._work.loss_of is not None:
                state.loss = self._work.loss_of(state, outcome.result)
            # The graph would keep the stage's inputs.
            state.result = tree.replace(outcome.result, Tensor.detach)
        elif self.following is not None:
            self._hand_on(state, self.following.microbatches[microbatch])
        if not self._training:
            self._live.now -= 1

    def send_forward(self, microbatch: int) -> None:
        """Send what crosses the boundary after this stage."""
        state = self.microbatches[microbatch]
        assert self._transport is not None
        structure = state.structure
        peer = self._rank_after
        if structure.fixed:
            for value, tensor in state.outputs.items():
                tensor = self._conform(tensor, structure.metas[value][0], structure, value)
                self._transport.send(tensor, peer, Channel.FORWARD)
        else:
            header = self._header(state)
            self._transport.send_object(header, peer)
            for tensor in state.outputs.values():
                self._transport.send(tensor, peer, Channel.FORWARD)
            self._note_metas(state, header)
        self._keep_edges(state)

    def post_forward(self, microbatch: int) -> bool:
        """Post the receives of a micro-batch's inputs, if their sizes are known."""
        state = self.microbatches[microbatch]
        structure = state.structure
        if not structure.fixed:
            return False
        self._delivery.post(microbatch)
        assert self._transport is not None
        peer = self._rank_before
        for value in structure.crossing[self.stage - 1]:
            meta = structure.metas[value][0]
            state.pending_values.append((value, self._transport.recv(meta, peer, Channel.FORWARD)))
        return True

    def receive_forward(self, microbatch: int) -> None:
        """Where the structure is not fixed, read the header and post the receives that it announces."""
        state = self.microbatches[microbatch]
        if state.structure.fixed:
            return
        assert self._transport is not None
        self._delivery.post(microbatch)
        peer = self._rank_before
        what = f"the record of micro-batch {microbatch} ({self.stage}F{microbatch})"
        header: Header = self._transport.recv_object(peer, what)
        state.header = header
        state.gradients_in = header.gradients
        self._note_metas(state, header)
        for value, meta, _ in header.values:
            state.pending_values.append((value, self._transport.recv(meta, peer, Channel.FORWARD)))

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, microbatch: int) -> None:
        """Run backward from the loss, or from the gradients of what crossed the boundary."""
        state = self.microbatches[microbatch]
        roots, gradients = self._roots(state)
        self._run_whole(state, roots, gradients)
        self._pass_back(state)
        self._finish_backward(state)

    def backward_input(self, microbatch: int) -> None:
        """The part of backward that the stage before waits for: the gradients of what was received."""
        state = self.microbatches[microbatch]
        received = state.received
        assert received is not None
        roots, gradients = self._roots(state)
        if self.last and not self._work.can_split:
            self._run_whole(state, roots, gradients)
        elif roots:
            received.backward_allowed = True
            state.split = SplitBackward(roots, gradients, received.take_edges())
            received.note_gradients(state.split.input_gradients())
        self._pass_back(state)

    def backward_weight(self, microbatch: int) -> None:
        """The rest of backward: the gradients of the stage's parameters."""
        state = self.microbatches[microbatch]
        self.ready_at = time.perf_counter()
        if state.split is not None:
            state.split.weight_gradients()
            state.split = None
        self._finish_backward(state)

    def send_backward(self, microbatch: int) -> None:
        """Send the gradients of what came from the stage before."""
        state = self.microbatches[microbatch]
        received = state.received
        assert self._transport is not None and received is not None
        peer = self._rank_before
        structure = state.structure
        values = self._gradients_across(structure) if structure.fixed else state.gradients_in
        if values is None:
            values = tuple(sorted(received.gradients))
            metas = [(value, TensorMeta.of(received.gradients[value])) for value in values]
            self._transport.send_object(metas, peer)
            for value in values:
                self._transport.send(received.gradients[value], peer, Channel.BACKWARD)
        else:
            for value in values:
                meta = self._meta(state, value)
                gradient = received.gradients.get(value)
                if gradient is None:
                    gradient = torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)
                self._transport.send(self._conform(gradient, meta, structure, value), peer, Channel.BACKWARD)
        received.gradients = {}
        state.metas = {}

    def post_backward(self, microbatch: int) -> bool:
        """Post the receives of the gradients, if it is known which will come."""
        state = self.microbatches[microbatch]
        values = state.structure.gradients[self.stage] if state.structure.fixed else state.gradients_out
        if values is None or (not state.structure.fixed and not state.metas.keys() >= set(values)):
            return False
        self._post_gradients(state, values)
        return True

    def receive_backward(self, microbatch: int) -> None:
        """Where it is not known which gradients come, read which."""
        state = self.microbatches[microbatch]
        if state.pending_gradients is not None:
            return
        assert self._transport is not None
        if state.gradients_out is not None:
            self._post_gradients(state, state.gradients_out)
            return
        peer = self._rank_after
        what = f"the list of gradients of micro-batch {microbatch} ({self.stage}B{microbatch})"
        metas = self._transport.recv_object(peer, what)
        state.pending_gradients = [
            (value, self._transport.recv(meta, peer, Channel.BACKWARD)) for value, meta in metas
        ]

    # -- between two stages of one rank -----------------------------------------------------------------------------

    def _hand_on(self, state: Microbatch, following: Microbatch) -> None:
        """Give the next stage, on this same rank, what crosses the boundary."""
        if not state.structure.fixed:
            header = self._header(state)
            record = header.record
            header.record = Record(list(record.events), dict(record.starts), dict(record.counts))
            following.header = header
            self._note_metas(state, header)
            following.metas = dict(state.metas)
        # Copies, as over a connection: the next stage may write into what it receives, and this one's graph needs it.
        following.pending_values = [(value, Here(tensor.detach().clone())) for value, tensor in state.outputs.items()]
        self._keep_edges(state)

    def _pass_back(self, state: Microbatch) -> None:
        """After the gradients of what was received are there: note them, and give them to the stage before, if it is
        on this same rank."""
        received = state.received
        assert received is not None
        if state.observer is not None:
            self.reports[state.structure.number].gradients |= set(received.gradients)
        if self.preceding is not None:
            before = self.preceding.microbatches[state.index]
            before.pending_gradients = [(value, Here(gradient)) for value, gradient in received.gradients.items()]
            received.gradients = {}

    # -- details ----------------------------------------------------------------------------------------------------

    def _roots(self, state: Microbatch) -> tuple[list[Tensor | GradientEdge], list[Tensor | None]]:
        """Where backward starts, with the gradients there."""
        if self.last:
            assert state.loss is not None
            loss, state.loss = state.loss, None
            self.ready_at = time.perf_counter()
            return [loss], [None]
        what = f"the gradients of micro-batch {state.index} ({self.stage}B{state.index})"
        roots: list[Tensor | GradientEdge] = []
        gradients: list[Tensor | None] = []
        for value, pending in state.pending_gradients or ():
            gradient = pending.wait(what)
            if value in state.edges:
                roots.append(state.edges[value])
                gradients.append(gradient)
        state.edges = {}
        state.pending_gradients = None
        self.ready_at = time.perf_counter()
        return roots, gradients

    def _run_whole(
        self, state: Microbatch, roots: list[Tensor | GradientEdge], gradients: list[Tensor | None]
    ) -> None:
        received = state.received
        assert received is not None
        received.take_edges()
        received.backward_allowed = True
        if self.last:
            self._work.run_backward(roots[0])  # type: ignore[arg-type]
        elif roots:
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]

    def _finish_backward(self, state: Microbatch) -> None:
        self._work.after_backward(self.stage, state)
        self._live.now -= 1

    def _keep_edges(self, state: Microbatch) -> None:
        """Keep of the outputs what backward needs: their places in the graph, not their data."""
        if self._training:
            structure = state.structure
            wanted = structure.gradients[self.stage] if structure.fixed else state.gradients_out
            for value, tensor in state.outputs.items():
                if tensor.requires_grad and (wanted is None or value in wanted):
                    state.edges[value] = get_gradient_edge(tensor)
        state.outputs = {}

    def _gradients_across(self, structure: Structure) -> tuple[ValueId, ...]:
        """The values of the boundary before this stage whose gradients go back."""
        return structure.gradients[self.stage - 1] if self._training else ()

    def _post_gradients(self, state: Microbatch, values: tuple[ValueId, ...]) -> None:
        assert self._transport is not None
        state.pending_gradients = [
            (value, self._transport.recv(self._meta(state, value), self._rank_after, Channel.BACKWARD))
            for value in values
        ]

    def _note_metas(self, state: Microbatch, header: Header) -> None:
        for value, meta, requires_grad in header.values:
            state.structure.metas[value] = (meta, requires_grad)
            state.metas[value] = meta

    def _meta(self, state: Microbatch, value: ValueId) -> TensorMeta:
        return state.metas[value] if state.metas else state.structure.metas[value][0]

    def _take_values(self, state: Microbatch) -> Received:
        what = f"the activations of micro-batch {state.index} ({self.stage}F{state.index})"
        values = {value: pending.wait(what) for value, pending in state.pending_values}
        state.pending_values = []
        if state.header is not None:
            requires_grad = {value for value, _, required in state.header.values if required}
        else:
            metas = state.structure.metas
            requires_grad = {value for value in values if metas[value][1]}
        return Received(values, requires_grad)

    def _record_so_far(self, state: Microbatch) -> Record:
        return state.header.record if state.header is not None else Record()

    def _observer(self, state: Microbatch, record: Record) -> Observer:
        known = self._template.records[self.stage].events if self._template is not None else None
        observer = Observer(
            record, self._interception.streams, self._tensor_names, self._interception.module_names, known=known
        )
        if state.header is not None:
            observer.note_alias_groups(state.header.aliases)
        return observer

    def _finish_observation(self, state: Microbatch, passed: str) -> None:
        observer, structure = state.observer, state.structure
        assert observer is not None
        record = observer.end(self.stage)
        counts_before = record.counts
        streams = self._interception.streams
        record.counts = {name: count for name, count in streams.counts.items() if name in streams.drawing}
        own = record.events[record.starts[self.stage] :]
        report = Report(
            usage=observer.usage,
            start=record.starts[self.stage],
            leaves=set(observer.leaves),
            dynamic=any(event.dynamic for event in own),
            events=tuple(event.name for event in own),
            passed=passed,
        )
        self.reports.setdefault(structure.number, Report()).merge(report)
        self._narrow(state, record)
        if not structure.settled:
            kept = copy.copy(record)
            kept.counts = counts_before
            structure.records[self.stage] = kept

    def _narrow(self, state: Microbatch, record: Record) -> None:
        """Events that are those of a known structure, in other shapes, send what is known to be needed."""
        template = self._template
        state.gradients_out = None if self._training else ()
        if self.last or template is None or record.dynamic:
            return
        if record.names() != template.records[self.stage].names():
            return
        state.outputs = {value: state.outputs[value] for value in template.crossing[self.stage]}
        if self._training:
            state.gradients_out = template.gradients[self.stage]

    def _header(self, state: Microbatch) -> Header:
        assert state.observer is not None
        values = []
        storages: dict[int, list[ValueId]] = {}
        for value, tensor in state.outputs.items():
            values.append((value, TensorMeta.of(tensor), tensor.requires_grad))
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(value)
        groups = {
            value: number for number, group in enumerate(storages.values()) if len(group) > 1 for value in group
        }
        return Header(state.observer.record, values, groups, state.gradients_out)

    def _conform(self, tensor: Tensor, meta: TensorMeta, structure: Any, value: ValueId) -> Tensor:
        """`tensor` with the strides that the receiver made room for."""
        found = TensorMeta.of(tensor)
        if found == meta:
            return tensor
        if found.shape != meta.shape or found.dtype != meta.dtype:
            name = structure.records[self.stage].events[value[0]].name
            raise RuntimeError(
                f"the result of {name!r} is {list(found.shape)} {found.dtype} and was {list(meta.shape)} {meta.dtype} "
                f"for the first micro-batch of this structure; a shape that depends on data cannot cross a boundary "
                f"unseen: move the boundary, or pad the value"
            )
        made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=tensor.device)
        return made.copy_(tensor.detach())
