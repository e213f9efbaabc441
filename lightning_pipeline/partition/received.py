"""Values that a stage received, and the gradients that come to them in backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from lightning_pipeline.partition.absent import Absent, ValueId, fill


class Received:
    """Values from earlier stages for one micro-batch.

    Args:
        values: the tensors, by value; each must have no other owner.
        requires_grad: those of them that require grad where they come from.
    """

    _anchor = torch.empty(0, requires_grad=True)

    def __init__(self, values: dict[ValueId, Tensor], requires_grad: Collection[ValueId]) -> None:
        self.gradients: dict[ValueId, Tensor] = {}
        """After backward: gradients of the values that have one."""
        self.backward_allowed = False
        self._node: Node | None = None
        self._values = values
        self._requires_grad = requires_grad
        self._attached: list[ValueId] = []

    def take_places(self, places: dict[ValueId, Tensor]) -> None:
        """Turn the objects that stand for the values in the user's code into the received tensors, with gradients.

        A value that nothing stands for any more is let go; one in a Parameter's place is put into `places` instead.
        """
        attach = []
        for value, data in self._values.items():
            place = places.get(value)
            if place is None:
                continue
            if type(place) is not Absent and isinstance(place, nn.Parameter):
                places[value] = data
                continue
            fill(place, data)
            if value in self._requires_grad:
                attach.append(place)
                self._attached.append(value)
        if attach:
            _attach(self, self._anchor, attach)
            self._node = attach[0].grad_fn
        self._values = {}

    def take_edges(self) -> list[GradientEdge]:
        """Where the values with gradients are in the graph, which is let go."""
        node, self._node = self._node, None
        return [GradientEdge(node, number) for number in range(len(self._attached))] if node is not None else []

    def let_go_of_graph(self) -> None:
        """Nobody will ask for the edges."""
        self._node = None

    def note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of the values, in the order of their `edges`; None where there is none."""
        for value, gradient in zip(self._attached, gradients, strict=True):
            if gradient is not None:
                self.gradients[value] = gradient


class _Attach(torch.autograd.Function):
    """Makes received tensors non-leaf tensors that are no views, as modules may write into them."""

    @staticmethod
    def forward(ctx: Any, received: Received, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.received = received
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if not ctx.received.backward_allowed:
            raise RuntimeError(
                "torch.autograd.grad or backward inside the step reached a value of an earlier stage; its graph is on "
                "another device. Compute such a gradient from values of one stage, or cut the model elsewhere"
            )
        ctx.received.note_gradients(gradients)
        return (None, None, *[None] * len(gradients))


# Taken here, as a running replay makes every other use of a Function an event. The second is what the first calls in
# the end: its part in Python is for functorch's transforms, and takes longer than all the rest.
_apply = _Attach.apply
_apply_plain = super(torch.autograd.Function, _Attach).apply


def _attach(received: Received, anchor: Tensor, tensors: list[Tensor]) -> None:
    apply = _apply if torch._C._are_functorch_transforms_active() else _apply_plain
    if torch.is_grad_enabled():
        apply(received, anchor, *tensors)
    else:
        with torch.enable_grad():  # the stage may begin where the step has gradients off for a while
            apply(received, anchor, *tensors)
