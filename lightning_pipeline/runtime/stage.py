"""A virtual stage's work on the micro-batches of a step: the user's step forward and back, up to its boundaries."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.engine import backward_from
from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.replay import Replay
from lightning_pipeline.partition.split_backward import SplitBackward
from lightning_pipeline.runtime.activation_gradients import ActivationGradients
from lightning_pipeline.runtime.activations import Activations
from lightning_pipeline.runtime.delivery import BatchDelivery
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.rehearsal import Rehearsal
from lightning_pipeline.runtime.site import Site
from lightning_pipeline.runtime.structure import Report, Structure
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.work import LiveCount, Work


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
        self.microbatches = microbatches
        self.following: Stage | None = None
        self.preceding: Stage | None = None
        self.ready_at = 0.0
        self._site = site = Site.of(stage, placement)
        self._last = site.last
        self._device = device
        self._interception = interception
        self._delivery = delivery
        self._work = work
        self._training = work.loss_of is not None
        self._live = live
        self._activations = Activations(site, transport, delivery, microbatches, training=self._training)
        self._gradients = ActivationGradients(site, transport, microbatches, device)
        fixed = all(state.structure.fixed for state in microbatches)
        self._rehearsal = None if fixed else Rehearsal(site, interception, template, training=self._training)
        self.send_forward = self._activations.send
        self.post_forward = self._activations.post
        self.receive_forward = self._activations.receive
        self.send_backward = self._gradients.send
        self.post_backward = self._gradients.post
        self.receive_backward = self._gradients.receive

    @property
    def reports(self) -> dict[int, Report]:
        """On each structure that is not fixed, by its number."""
        return self._rehearsal.reports if self._rehearsal is not None else {}

    def forward(self, microbatch: int) -> None:
        """Run the step of one micro-batch up to the end of this stage."""
        state = self.microbatches[microbatch]
        structure, stage, interception = state.structure, self.stage, self._interception
        fixed = structure.fixed
        if stage == 0:
            self._delivery.send(microbatch)
        state.received = received = self._activations.take(state)
        batch = self._delivery.take(microbatch, stage)
        self.ready_at = time.perf_counter()
        if fixed:
            record, crossing = structure.records[stage], structure.crossing_after(stage, interception.modules)
        else:
            assert self._rehearsal is not None
            record, crossing = self._rehearsal.begin(state), None
        replay = Replay(
            stage=stage,
            num_stages=self._site.num_stages,
            device=self._device,
            streams=interception.streams,
            record=record,
            received=received,
            batch=batch,
            crossing=crossing,
            observer=state.observer,
            modules=interception.modules,
            term=self._site.term,
        )
        value = tree.rebuild(state.layout, batch)
        interception.streams.begin(state.seed, observing=not fixed)
        outcome = interception.run(replay, self._work.step, state, value)
        self._live.add()
        state.outputs = outcome.outputs
        if not fixed:
            assert self._rehearsal is not None
            interception.streams.end_observed()
            self._rehearsal.end(state, outcome.passed)
        if self._last:
            if self._work.loss_of is not None:
                state.loss = self._work.loss_of(state, outcome.result)
            # The graph would keep the stage's inputs.
            state.result = tree.replace(outcome.result, Tensor.detach)
        elif self.following is not None:
            self._activations.hand_on(state, self.following.microbatches[microbatch])
        if not self._training:
            self._live.now -= 1

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
        if self._last and not self._work.can_split:
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

    # -- details ----------------------------------------------------------------------------------------------------

    def _roots(self, state: Microbatch) -> tuple[Sequence[Tensor | GradientEdge], Sequence[Tensor | None]]:
        """Where backward starts, with the gradients there."""
        if self._last:
            assert state.loss is not None
            loss, state.loss = state.loss, None
            self.ready_at = time.perf_counter()
            return [loss], [None]
        edges, gradients = self._gradients.take(state)
        self.ready_at = time.perf_counter()
        return edges, gradients

    def _run_whole(
        self, state: Microbatch, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]
    ) -> None:
        received = state.received
        assert received is not None
        received.let_go_of_graph()
        received.backward_allowed = True
        if self._last:
            self._work.run_backward(roots[0])  # type: ignore[arg-type]
        elif roots:
            backward_from(roots, gradients)

    def _pass_back(self, state: Microbatch) -> None:
        """After the gradients of what was received are there: note them, and give them to the stage before, if it is
        on this same rank."""
        if state.observer is not None:
            assert self._rehearsal is not None
            self._rehearsal.note_gradients(state)
        if self.preceding is not None:
            self._gradients.hand_back(state, self.preceding.microbatches[state.index])

    def _finish_backward(self, state: Microbatch) -> None:
        self._work.after_backward(self.stage, state)
        self._live.now -= 1
