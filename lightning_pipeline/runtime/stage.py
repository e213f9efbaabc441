"""One stage's work on the micro-batches of a step: receive, run, send, and back."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.absent import ValueId
from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.observer import Observer
from lightning_pipeline.partition.received import Received
from lightning_pipeline.partition.record import Record
from lightning_pipeline.partition.replay import Replay
from lightning_pipeline.runtime.delivery import BatchDelivery
from lightning_pipeline.runtime.microbatch import Header, Microbatch
from lightning_pipeline.runtime.structure import Report, Structure
from lightning_pipeline.runtime.transport import Channel, TensorMeta, Transport


class Stage:
    """What this rank does with the micro-batches of one step.

    Args:
        interception: the module's intercepted calls.
        transport: the connection to the other stages; None with one stage.
        step: runs the user's step on one micro-batch.
        loss_of: takes the micro-batch's result to the loss that backward starts from; None without backward.
        run_backward: runs backward from a loss.
        after_backward: called after each micro-batch's backward.
        template: a settled structure of the same kind of step, whose events a new structure is likely to share.
    """

    def __init__(
        self,
        *,
        stage: int,
        num_stages: int,
        device: torch.device,
        interception: Interception,
        transport: Transport | None,
        microbatches: list[Microbatch],
        step: Callable[[Microbatch, Any], Any],
        loss_of: Callable[[Microbatch, Any], Tensor] | None,
        run_backward: Callable[[Tensor], None],
        after_backward: Callable[[], None],
        template: Structure | None,
    ) -> None:
        self.stage = stage
        self.last = stage == num_stages - 1
        self.microbatches = microbatches
        self.reports: dict[int, Report] = {}
        self.live = 0
        self.peak_live = 0
        self.ready_at = 0.0
        self._num_stages = num_stages
        self._device = device
        self._interception = interception
        self._transport = transport
        self._delivery = BatchDelivery(microbatches, transport, stage=stage, num_stages=num_stages, device=device)
        self._step = step
        self._loss_of = loss_of
        self._run_backward = run_backward
        self._after_backward = after_backward
        self._template = template
        fixed = all(state.structure.fixed for state in microbatches)
        self._tensor_names = {} if fixed else interception.tensor_names()

    def begin(self) -> None:
        """Before the schedule."""
        self._delivery.begin()

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int) -> None:
        """Run the step of one micro-batch up to the end of this stage."""
        state = self.microbatches[microbatch]
        structure = state.structure
        self._delivery.send(state)
        received = self._take_values(state)
        batch = self._delivery.take(state)
        self.ready_at = time.perf_counter()
        record = structure.record if structure.fixed else self._record_so_far(state)
        crossing: tuple[ValueId, ...] = ()
        if structure.fixed:
            crossing = structure.crossing[self.stage] if not self.last else ()
        else:
            state.observer = Observer(
                record,
                self._interception.streams,
                self._tensor_names,
                self._interception.module_names,
                known=self._template.record.events if self._template is not None else None,
            )
            if state.header is not None:
                state.observer.note_alias_groups(state.header.aliases)
        replay = Replay(
            stage=self.stage,
            num_stages=self._num_stages,
            device=self._device,
            streams=self._interception.streams,
            record=record,
            received=received,
            batch=batch,
            crossing=crossing,
            observer=state.observer,
            modules=self._interception.modules,
        )
        value = tree.rebuild(state.layout, batch)
        self._interception.streams.begin(state.seed, observing=state.observer is not None)
        with self._interception.running(replay):
            outcome = replay.run(lambda: self._step(state, value))
        self.live += 1
        self.peak_live = max(self.peak_live, self.live)
        state.received = received
        state.outputs = outcome.outputs
        if state.observer is not None:
            self._interception.streams.end_observed()
            self._finish_observation(state, outcome.passed)
        if self.last:
            if self._loss_of is not None:
                state.loss = self._loss_of(state, outcome.result)
            # The graph would keep the stage's inputs.
            state.result = tree.replace(outcome.result, lambda tensor: tensor.detach())
        if self._loss_of is None:
            self.live -= 1

    def send_forward(self, microbatch: int) -> None:
        """Send what crosses the boundary after this stage."""
        state = self.microbatches[microbatch]
        assert self._transport is not None
        structure = state.structure
        peer = self.stage + 1
        if structure.fixed:
            state.gradients_out = structure.gradients[self.stage] if self._loss_of is not None else ()
            for value, tensor in state.outputs.items():
                tensor = self._conform(tensor, structure.metas[value][0], structure, value)
                self._transport.send(tensor, peer, Channel.FORWARD)
        else:
            header = self._header(state)
            self._transport.send_object(header, peer)
            for tensor in state.outputs.values():
                self._transport.send(tensor, peer, Channel.FORWARD)
            for value, meta, requires_grad in header.values:
                structure.metas[value] = (meta, requires_grad)
                state.metas[value] = meta
        if self._loss_of is not None:
            state.keep_edges()
        state.outputs = {}

    def post_forward(self, microbatch: int) -> bool:
        """Post the receives of a micro-batch's inputs, if their sizes are known."""
        state = self.microbatches[microbatch]
        structure = state.structure
        if not structure.fixed:
            return False
        self._delivery.post(state)
        assert self._transport is not None
        state.gradients_in = structure.gradients[self.stage - 1] if self._loss_of is not None else ()
        for value in structure.crossing[self.stage - 1]:
            meta = structure.metas[value][0]
            state.pending_values.append((value, self._transport.recv(meta, self.stage - 1, Channel.FORWARD)))
        return True

    def receive_forward(self, microbatch: int) -> None:
        """Where the structure is not fixed, read the header and post the receives that it announces."""
        state = self.microbatches[microbatch]
        if state.structure.fixed:
            return
        assert self._transport is not None
        self._delivery.post(state)
        peer = self.stage - 1
        what = f"the record of micro-batch {microbatch} ({self.stage}F{microbatch})"
        header: Header = self._transport.recv_object(peer, what)
        state.header = header
        state.gradients_in = header.gradients
        for value, meta, requires_grad in header.values:
            state.structure.metas[value] = (meta, requires_grad)
            state.metas[value] = meta
            state.pending_values.append((value, self._transport.recv(meta, peer, Channel.FORWARD)))

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, microbatch: int) -> None:
        """Run backward from the loss, or from the gradients of what crossed the boundary."""
        state = self.microbatches[microbatch]
        received = state.received
        assert received is not None
        received.backward_allowed = True
        if self.last:
            assert state.loss is not None
            self._run_backward(state.loss)
            state.loss = None
        else:
            what = f"the gradients of micro-batch {microbatch} ({self.stage}B{microbatch})"
            edges, gradients = [], []
            for value, pending in state.pending_gradients or ():
                gradient = pending.wait(what)
                if value in state.edges:
                    edges.append(state.edges[value])
                    gradients.append(gradient)
            self.ready_at = time.perf_counter()
            if edges:
                torch.autograd.backward(edges, gradients)
        self._after_backward()
        state.edges = {}
        state.pending_gradients = None
        self.live -= 1
        if state.observer is not None:
            self.reports[state.structure.number].gradients |= set(received.gradients)

    def send_backward(self, microbatch: int) -> None:
        """Send the gradients of what came from the stage before."""
        state = self.microbatches[microbatch]
        received = state.received
        assert self._transport is not None and received is not None
        peer = self.stage - 1
        values = state.gradients_in
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
                self._transport.send(self._conform(gradient, meta, state.structure, value), peer, Channel.BACKWARD)
        state.received = None
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
        peer = self.stage + 1
        what = f"the list of gradients of micro-batch {microbatch} ({self.stage}B{microbatch})"
        metas = self._transport.recv_object(peer, what)
        state.pending_gradients = [
            (value, self._transport.recv(meta, peer, Channel.BACKWARD)) for value, meta in metas
        ]

    # -- details ----------------------------------------------------------------------------------------------------

    def _post_gradients(self, state: Microbatch, values: tuple[ValueId, ...]) -> None:
        assert self._transport is not None
        state.pending_gradients = [
            (value, self._transport.recv(self._meta(state, value), self.stage + 1, Channel.BACKWARD))
            for value in values
        ]

    def _meta(self, state: Microbatch, value: ValueId) -> TensorMeta:
        return state.metas[value] if state.metas else state.structure.metas[value][0]

    def _take_values(self, state: Microbatch) -> Received:
        what = f"the activations of micro-batch {state.index} ({self.stage}F{state.index})"
        values = {value: pending.wait(what) for value, pending in state.pending_values}
        state.pending_values = []
        metas = state.structure.metas
        return Received(values, {value for value in values if metas[value][1]})

    def _record_so_far(self, state: Microbatch) -> Record:
        return state.header.record if state.header is not None else Record()

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
            structure.record = kept

    def _narrow(self, state: Microbatch, record: Record) -> None:
        """Events that are those of a known structure, in other shapes, send what is known to be needed."""
        template = self._template
        state.gradients_out = None if self._loss_of is not None else ()
        if self.last or template is None or record.dynamic or record.names() != template.record.names():
            return
        state.outputs = {value: state.outputs[value] for value in template.crossing[self.stage]}
        if self._loss_of is not None:
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
            name = structure.record.events[value[0]].name
            raise RuntimeError(
                f"the result of {name!r} is {list(found.shape)} {found.dtype} and was {list(meta.shape)} {meta.dtype} "
                f"for the first micro-batch of this structure; a shape that depends on data cannot cross a boundary "
                f"unseen: move the boundary, or pad the value"
            )
        made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=tensor.device)
        return made.copy_(tensor.detach())
