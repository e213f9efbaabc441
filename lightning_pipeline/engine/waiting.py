"""What a visit's micro-batches have saved, while they wait for their backward in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.offloading import Offload
from lightning_pipeline.engine.work import LiveCount
from lightning_pipeline.partition.memory import memory_of


class WaitingActivations:
    """Moves what the micro-batches of a visit have saved to host memory, and back; the methods are those of `Move`."""

    def __init__(self, visit: int, microbatches: Sequence[Microbatch], live: LiveCount, offload: Offload) -> None:
        self._visit, self._microbatches, self._live, self._offload = visit, microbatches, live, offload

    def note_saved(self, microbatch: int) -> None:
        """Count the bytes that a micro-batch has saved, in steps that are observed."""
        state = self._microbatches[microbatch]
        if self._offload.measures and not state.is_done:
            self._offload.note(self._visit, self._saving_nodes(state), self._held_of(state))

    def send_away(self, microbatch: int) -> None:
        """Begin to copy what a micro-batch has saved to host memory."""
        state = self._microbatches[microbatch]
        nodes = self._saving_nodes(state)
        if nodes and not state.is_done:
            saved = self._offload.note(self._visit, nodes, self._held_of(state))
            state.on(self._visit).away = self._offload.send(self._visit, saved)

    def settle(self, microbatch: int) -> None:
        """Free what has gone to host memory."""
        state = self._microbatches[microbatch]
        inside = state.on(self._visit)
        if inside.away is not None:
            crossing = inside.kept_leaves.values()  # a later part of the step uses their data
            for leaf in inside.received.values():
                # Backward needs its place in the graph, not its data.
                if memory_of(leaf) in inside.away and all(leaf is not one for one in crossing):
                    leaf.data = leaf.new_empty(0)
            for block in inside.away.values():
                block.let_go()
            self._note_away(state, -1)

    def fetch(self, microbatch: int) -> None:
        """Begin to copy it back."""
        state = self._microbatches[microbatch]
        away = state.on(self._visit).away
        if away is not None:
            self._offload.fetch(away.values())
            self._note_away(state, 1)

    def arrive(self, microbatch: int) -> None:
        """Let the backward that follows wait for it."""
        inside = self._microbatches[microbatch].on(self._visit)
        if inside.away is not None:
            for block in inside.away.values():
                block.arrive()
            inside.away = None

    def _note_away(self, state: Microbatch, sign: int) -> None:
        share = sign * self._offload.share
        self._live.add(share)
        if state.ahead is not None:
            state.ahead.num_live += share

    def _saving_nodes(self, state: Microbatch) -> list[Node]:
        """Where the graph of this visit begins, from its end."""
        inside = state.on(self._visit)
        nodes = [edge.node for edge in inside.edges.values() if isinstance(edge, GradientEdge)]
        is_here = state.program is not None and state.program.homes.get(state.loss_value) == self._visit
        if is_here and state.loss_tensor is not None and state.loss_tensor.grad_fn is not None:
            nodes.append(state.loss_tensor.grad_fn)
        return nodes

    def _held_of(self, state: Microbatch) -> list[Tensor]:
        """Tensors that stay on the device as long as a micro-batch does."""
        inside, captured = state.on(self._visit), (one for one in state.captured if isinstance(one, Tensor))
        here = () if state.carried is None else state.carried.here.values()
        outputs = (tensor for _, tensor in inside.outputs)
        return [*state.given, *captured, *state.kept.values(), *here, *inside.kept_leaves.values(), *outputs]
