"""One visit's forward and backward for each micro-batch of a step.

Received tensors become leaves of the visit's own autograd graph. Of a sent tensor only the gradient edge is kept, so
that its memory can be freed::

    forward    receive ── leaf ── events ── outputs ── send
    backward   send ── leaf.grad ── autograd ── gradients of outputs ── receive
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_pipeline import _torch
from lightning_pipeline.engine.gradient_strides import GradientStrides
from lightning_pipeline.engine.microbatch import ArrivedTensor, Microbatch, VisitState, take_earlier_values
from lightning_pipeline.engine.transfers import requiring_gradients, written_into
from lightning_pipeline.engine.waiting import WaitingActivations
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.backward_calls import backward_from, caught
from lightning_pipeline.recording.execution import note_failed_call, visit_function
from lightning_pipeline.recording.split_backward import SplitBackward
from lightning_pipeline.runtime.errors import PeerFailedError, PipelineTimeoutError
from lightning_pipeline.runtime.tensor_meta import TensorMeta, arrived, conform, from_memory, wire, zeros_like
from lightning_pipeline.runtime.topology import Channel

if TYPE_CHECKING:
    from lightning_pipeline.engine.step import PipelineStep


class Visit:
    """Runs the micro-batches of one step on one visit of this rank.

    Args:
        visit: index of the visit, in the order of the forward pass.
        record: runs the user's step on a micro-batch, unless that has been done.

    Attributes:
        following, preceding: the next and previous visit if they are on this rank, else None; set by the caller.
        waiting: moves activations to host memory and back; None if all stay.
        ready_at: when the inputs of the last forward or backward had arrived (`time.perf_counter`).
    """

    def __init__(self, visit: int, step: PipelineStep, record: Callable[[Microbatch], None]) -> None:
        shared = step.shared
        self.visit = visit
        self.following: Visit | None = None
        self.preceding: Visit | None = None
        self.ready_at = 0.0
        self._rank_before, self._rank_after = shared.rank_of(visit - 1), shared.rank_of(visit + 1)
        self._transport = shared.transport
        self._microbatches = step.states
        self._record = record
        self._tensors = shared.tensors.tensors
        self._seed_draw = shared.draws.seed
        self._work, self._live, self._ahead = step.work, step.live, step.ahead
        self._training = step.work.loss_of is not None
        offload = shared.offload
        self.waiting = None if offload is None else WaitingActivations(visit, step.states, step.live, offload)

    # -- forward ----------------------------------------------------------------------------------------------------

    def post_forward(self, microbatch: int) -> bool:
        """Post the receives of a micro-batch's inputs. Returns False if it is not recorded yet, so they are unknown."""
        state = self._microbatches[microbatch]
        if state.is_done:
            return True
        if state.program is None:
            return False
        inside = state.on(self.visit)
        if not inside.is_posted:
            inside.is_posted = True
            assert self._transport is not None
            inside.arriving = [
                self._transport.recv(wire(state.program.sent_spec(strand.value)), self._rank_before, Channel.FORWARD)
                for strand in self._receives(state)
                if strand.value >= 0
            ]
        return True

    def receive_forward(self, microbatch: int) -> None:
        state = self._microbatches[microbatch]
        if not state.is_done and state.ahead is None:
            self._record(state)
        self.post_forward(microbatch)

    def forward(self, microbatch: int) -> None:
        """Run the visit's part of a micro-batch's program."""
        state = self._microbatches[microbatch]
        if not state.is_done and state.ahead is None:
            self._record(state)
        if state.is_done:
            return
        inside = state.on(self.visit)
        use = self._take(state, inside)
        self.ready_at = time.perf_counter()
        if state.ahead is None:
            self._live.add()
            self._compute(state, inside, use)
        else:
            self._compute_ahead(state, inside, use)
        if self._training and (state.ahead is None or not (state.ahead.is_passed_over or state.ahead.error)):
            inside.keep_edges(self.visit, state)
        if self.following is not None:
            # Copies, as over a connection: the next visit may write into what it receives.
            self._microbatches[microbatch].on(self.visit + 1).arriving = [
                ArrivedTensor(tensor.detach().clone()) for strand, tensor in inside.outputs if strand.value >= 0
            ]
            inside.outputs = []
        if not self._training and not state.is_passed_over:
            self._live.now -= 1

    def _compute(self, state: Microbatch, inside: VisitState, use: Sequence[Tensor]) -> None:
        program = state.program
        assert program is not None
        if self.visit >= len(program.visits):
            return
        kept = tuple(value for value in state.asked if program.homes[value] == self.visit)
        key = (self.visit, kept)
        run = program.functions.get(key)
        if run is None:
            run = program.functions[key] = visit_function(program, self.visit, kept)
        take_earlier_values(state, self.visit, self._microbatches)
        before = torch.is_grad_enabled()
        try:
            sends, found = run(
                use,
                state.captured,
                self._tensors,
                lambda number: self._seed_draw(state.seed, number),
                {**dict(enumerate(state.given)), **state.kept} if program.carried else state.given,
            )
        except Exception as error:
            note_failed_call(error)
            raise
        finally:
            _torch.set_grad_enabled(before)
        for value, tensor in zip(kept, found, strict=True):
            if value == state.loss_value:
                state.loss_tensor = tensor
            state.kept[value] = tensor.detach()
            if state.carried is not None:
                state.carried.here[program.begins + self.visit, value] = tensor
        inside.outputs = list(zip(program.visits[self.visit].sends, sends, strict=True))

    def _compute_ahead(self, state: Microbatch, inside: VisitState, use: Sequence[Tensor]) -> None:
        """Run a forward before the step's Python.

        The Python may still take another path, so an exception is kept and raised only if the Python gets here, too.
        """
        assert self._ahead is not None and state.ahead is not None and state.program is not None
        if not state.ahead.is_passed_over:
            self._live.add()
            state.ahead.num_live += self._training
            if self.visit < len(state.program.visits):
                self._ahead.note_written(state, self.visit)
            try:
                self._compute(state, inside, use)
            except (PeerFailedError, PipelineTimeoutError):
                raise
            except Exception as error:
                state.ahead.error = error
        # The next rank has posted its receives: it needs tensors of the right shape even when there is no result.
        if (state.ahead.is_passed_over or state.ahead.error) and self.visit < len(state.program.visits):
            sends = state.program.visits[self.visit].sends
            inside.outputs = [(strand, zeros_like(state.program.sent_spec(strand.value))) for strand in sends]
        self._ahead.tell(state, self.visit)

    def send_forward(self, microbatch: int) -> None:
        state = self._microbatches[microbatch]
        if state.is_done:
            return
        inside = state.on(self.visit)
        assert self._transport is not None and state.program is not None
        for strand, tensor in inside.outputs:
            if strand.value >= 0:
                spec = state.program.sent_spec(strand.value)
                self._transport.send(conform(tensor, spec), self._rank_after, Channel.FORWARD)
        inside.outputs = []

    def _take(self, state: Microbatch, inside: VisitState) -> list[Tensor]:
        """Wait for a micro-batch's inputs, and return them."""
        what = f"the activations of micro-batch {state.index} ({self.visit}F{state.index})"
        use = []
        assert state.program is not None
        arriving = iter(inside.arriving or ())
        for strand in self._receives(state):
            spec = state.program.sent_spec(strand.value)
            if strand.value < 0:
                tensor = self._parameter(-1 - strand.value, spec)
            else:
                tensor = arrived(next(arriving).wait(what), spec, state.beginning_of(strand.value))
            if self._training and spec.requires_grad:
                # The step may modify its input in place, which autograd forbids for a leaf.
                inside.received[strand] = tensor.requires_grad_()
                tensor = written_into(tensor)
            elif spec.requires_grad:
                tensor = requiring_gradients(tensor)
            use.append(tensor)
        inside.arriving = None
        return use

    def _parameter(self, number: int, spec: TensorSpec) -> Tensor:
        """A parameter whose gradient goes on to the visit before; without data where this rank only passes it on."""
        tensor = self._tensors[number]
        if tensor.is_meta:
            return torch.zeros((), dtype=spec.dtype, device=spec.device).expand(spec.shape)
        return tensor.detach()

    def _receives(self, state: Microbatch) -> Sequence[Any]:
        assert state.program is not None
        visits = state.program.visits
        return visits[self.visit].receives if self.visit < len(visits) else ()

    # -- backward ---------------------------------------------------------------------------------------------------

    def post_backward(self, microbatch: int) -> bool:
        state = self._microbatches[microbatch]
        if state.is_done:
            return True
        if state.program is None:
            return False
        inside, known = state.on(self.visit), self._strides(state, self.visit + 1)
        if not inside.are_gradients_posted:
            if not known.can_post():
                return False
            inside.are_gradients_posted = True
            inside.arriving_strides = known.post(self._receive_back)
            inside.arriving_gradients = [self._receive_back(meta) for meta in known.metas]
        return True

    def receive_backward(self, microbatch: int) -> None:
        state = self._microbatches[microbatch]
        if not self.post_backward(microbatch) and state.program is not None:
            self._strides(state, self.visit + 1).hear(_gradients_of(state, self.visit))
            self.post_backward(microbatch)

    def _receive_back(self, meta: TensorMeta) -> Any:
        assert self._transport is not None
        return self._transport.recv(meta, self._rank_after, Channel.BACKWARD)

    def _strides(self, state: Microbatch, visit: int) -> GradientStrides:
        program, key = state.program, (visit, state.loss_value)
        assert program is not None
        found = program.gradient_strides.get(key)
        if found is None:
            specs = [program.sent_spec(strand.value) for strand in program.returning(*key)]
            found = program.gradient_strides[key] = GradientStrides(specs)
        return found

    def _to_go_back(self, microbatch: int) -> Microbatch | None:
        """The micro-batch, if there is something to compute.

        For one that is passed over, gradients are received and sent, so that every posted receive is matched.
        """
        state = self._microbatches[microbatch]
        if state.is_done:
            return None
        if state.is_passed_over:
            self._gradients(state, state.on(self.visit))
            assert state.program is not None
            self._pass_back(state, [None] * len(state.program.returning(self.visit, state.loss_value)))
            return None
        state.let_age()
        return state

    def backward(self, microbatch: int) -> None:
        """Run backward from the loss and from the outputs that were sent."""
        state = self._to_go_back(microbatch)
        if state is None:
            return
        roots, gradients = self._roots(state)
        inside = state.on(self.visit)
        with caught(self._leaves(state, inside)) as found:
            if len(gradients) == 1 and gradients[0] is None:  # `[tensor] == [None]` would compare the tensor
                self._work.run_backward(roots[0])
            elif roots:
                given = zip(roots, gradients, strict=True)
                backward_from(roots, [torch.ones_like(root) if g is None else g for root, g in given])
        self._pass_back(state, found)
        inside.received = {}
        self._finish_backward(state)

    def backward_input(self, microbatch: int) -> None:
        """Compute the gradients of the received inputs, which the previous visit waits for."""
        state = self._to_go_back(microbatch)
        if state is None:
            return
        inside = state.on(self.visit)
        leaves = self._leaves(state, inside)
        roots, gradients = self._roots(state)
        found: Sequence[Tensor | None] = [None] * len(leaves)
        is_loss = len(gradients) == 1 and gradients[0] is None
        if is_loss and not self._work.can_split:
            with caught(leaves) as found:
                self._work.run_backward(roots[0])
        elif roots:
            # The graph is kept until `backward_weight`.
            inside.split = SplitBackward(roots, gradients, [get_gradient_edge(leaf) for leaf in leaves])
            found = inside.split.input_gradients()
        inside.received = {}
        self._pass_back(state, found)

    def backward_weight(self, microbatch: int) -> None:
        """Compute the gradients of the parameters, the rest of backward."""
        state = self._microbatches[microbatch]
        if state.is_done or state.is_passed_over:
            return
        self.ready_at = time.perf_counter()
        inside = state.on(self.visit)
        if inside.split is not None:
            inside.split.weight_gradients()
            inside.split = None
        self._finish_backward(state)

    def send_backward(self, microbatch: int) -> None:
        state = self._microbatches[microbatch]
        if state.is_done:
            return
        inside = state.on(self.visit)
        assert self._transport is not None
        strides = self._strides(state, self.visit)
        message = strides.announce(inside.gradients)
        for gradient in (*([] if message is None else [message]), *strides.to_send(inside.gradients)):
            self._transport.send(gradient, self._rank_before, Channel.BACKWARD)
        inside.gradients = []

    def _roots(self, state: Microbatch) -> tuple[list[Any], list[Tensor | None]]:
        """The tensors or edges from which backward starts, with their gradients; None for the loss."""
        inside = state.on(self.visit)
        program = state.program
        assert program is not None
        roots: list[Any] = [inside.edges[strand] for strand in program.returning(self.visit + 1, state.loss_value)]
        gradients: list[Tensor | None] = [*self._gradients(state, inside)]
        inside.edges = {}
        if state.loss_tensor is not None and program.homes[state.loss_value] == self.visit:
            assert self._work.loss_of is not None
            loss, state.loss_tensor = state.loss_tensor, None
            roots.append(self._work.loss_of(state, loss))
            gradients.append(None)
        self.ready_at = time.perf_counter()
        return roots, gradients

    def _gradients(self, state: Microbatch, inside: VisitState) -> list[Tensor]:
        """Wait for the gradients of the outputs that were sent."""
        arriving, inside.arriving_gradients = inside.arriving_gradients or [], None
        what = _gradients_of(state, self.visit)
        if self.following is not None or not arriving:
            return [one.wait(what) for one in arriving]
        known = self._strides(state, self.visit + 1)
        strides = known.strides(inside.arriving_strides, what)
        inside.arriving_strides = None
        return known.where_values_are(
            [from_memory(one.wait(what), stride) for one, stride in zip(arriving, strides, strict=True)]
        )

    def _leaves(self, state: Microbatch, inside: VisitState) -> list[Tensor]:
        assert state.program is not None
        return [inside.received[strand] for strand in state.program.returning(self.visit, state.loss_value)]

    def _pass_back(self, state: Microbatch, gradients: Sequence[Tensor | None]) -> None:
        assert state.program is not None
        inside = state.on(self.visit)
        strands = state.program.returning(self.visit, state.loss_value)
        for strand, gradient in zip(strands, gradients, strict=True):
            inside.gradients.append(zeros_like(state.program.sent_spec(strand.value)) if gradient is None else gradient)
        if self.preceding is not None:
            state.on(self.visit - 1).arriving_gradients = [ArrivedTensor(gradient) for gradient in inside.gradients]
            inside.gradients = []

    def _finish_backward(self, state: Microbatch) -> None:
        self._work.after_backward(self.visit, state)
        self._live.now -= 1


def _gradients_of(state: Microbatch, visit: int) -> str:
    return f"the gradients of micro-batch {state.index} ({visit}B{state.index})"
