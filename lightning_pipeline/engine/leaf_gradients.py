"""Gradients of leaf tensors that are not parameters, such as a batch after `requires_grad_()`.

A step's backward leaves them on the ranks that computed with the tensors; when it ends, all ranks get them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.recording.graph_walk import edges_before
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.transport import Transport


class LeafGradients:
    """Shares the gradients of leaves that steps capture."""

    def __init__(self, tensors: ModuleTensors, transport: Transport, direct: DirectTransport) -> None:
        self._tensors = tensors
        self._transport = transport
        self._direct = direct
        self._known: list[weakref.ref[Tensor]] = []
        self._before: list[tuple[Tensor, Tensor | None, int]] = []  # leaf, its gradient, and the gradient's version

    def begin(self) -> None:
        """Called when a step begins: remember the leaves' gradients."""
        leaves = [leaf for leaf in (reference() for reference in self._known) if leaf is not None]
        self._before = [(leaf, leaf.grad, _num_writes(leaf.grad)) for leaf in leaves]

    def share(self, captured: Sequence[Tensor]) -> None:
        """Called when a step ends: share the gradients of the leaves that it captured. All ranks must call it."""
        if not captured:
            self._before = []
            return
        leaves = [leaf for leaf in _leaves(captured) if self._is_shared(leaf)]
        own = [leaf.grad is not None and self._has_changed(leaf) for leaf in leaves]
        vector = torch.tensor(own, dtype=torch.float64)
        rows = self._transport.all_gather_vector(vector, "gradients of tensors").tolist()
        for index, leaf in enumerate(leaves):
            self._share_one(leaf, [rank for rank, row in enumerate(rows) if row[index]])
        self._known, self._before = [weakref.ref(leaf) for leaf in leaves], []

    def _has_changed(self, leaf: Tensor) -> bool:
        """Whether its gradient was replaced or modified since the step began."""
        for before, gradient, writes in self._before:
            if before is leaf:
                return leaf.grad is not gradient or _num_writes(leaf.grad) != writes
        return True

    def _share_one(self, leaf: Tensor, ranks: Sequence[int]) -> None:
        old = next((gradient for before, gradient, _ in self._before if before is leaf), None)
        if len(ranks) > 1 and old is not None and leaf.grad is old:
            raise NotImplementedError(
                f"the gradient of a tensor of shape {list(leaf.shape)} that is no parameter adds up over steps, and "
                f"several stages compute with it: make it a parameter, or set its grad to None after each step"
            )
        spec = TensorSpec.of(leaf).but(requires_grad=False, is_parameter=False)
        total: Tensor | None = None
        for rank in reversed(ranks):  # as autograd sums in one process: later uses first
            part = self._direct.spread(leaf.grad if rank == self._direct.rank else None, spec, rank)
            total = part if total is None else total + part
        if total is not None:
            leaf.grad = total

    def _is_shared(self, leaf: Tensor) -> bool:
        is_modules = self._tensors.number_of(leaf) is not None
        return not is_modules and type(leaf) is not Placeholder and holders_of(leaf) is None


def give_back(moved: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Give leaves of the user's the gradients of those that stand for them (`Recording.moved_leaves`)."""
    for stand_in, leaf, before in moved:
        if type(leaf) is Placeholder:
            continue  # the user's code does not refer to it any more
        known, new = before if leaf.grad is None else leaf.grad, stand_in.grad
        leaf.grad = known if new is None else new if known is None else known + new


def _num_writes(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The leaves from which tensors were computed, each once, in the same order on all ranks."""
    found = [tensor for tensor in tensors if tensor.grad_fn is None]
    edges = edges_before(tensors, ())
    found += [edge.node.variable for _, _, edge in edges if hasattr(edge.node, "variable")]
    return list({id(leaf): leaf for leaf in found}.values())


def refusing_gradient(data: Tensor, line: str) -> Tensor:
    """A leaf that an earlier micro-batch has made, for a graph from which no gradient may flow into it.

    Args:
        line: of the user's that uses it.
    """

    def refuse(gradient: Tensor) -> None:
        raise NotImplementedError(
            f"a gradient would flow from one micro-batch into a tensor that an earlier one has made and that requires "
            f"one ({line}): make it a parameter in __init__, or use it detached, as in value.detach()"
        )

    leaf = data.detach().requires_grad_()
    leaf.register_hook(refuse)
    return leaf
