"""Backward without the checks of torch's own call, and gradients of leaves without their `.grad`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_pipeline import _torch
from lightning_pipeline.recording.graph_walk import edges_before


def backward_from(
    roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None], *, retain_graph: bool = False
) -> None:
    """Like `torch.autograd.backward`, for gradients that have the shapes and dtypes of the roots.

    torch checks that first, which takes as long as a small layer's backward. Gradients that another stage sent have
    been checked on arrival.
    """
    _torch.run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_from_loss(loss: Tensor, *, retain_graph: bool = False) -> None:
    """Like ``loss.backward()``, for a loss without dimensions."""
    if type(loss) is Tensor and loss.is_floating_point():
        backward_from((loss,), (torch.ones_like(loss),), retain_graph=retain_graph)
    else:
        loss.backward(retain_graph=retain_graph)


class CaughtGradient:
    """Catches a leaf's gradient as it is, before it reaches `.grad`, where it would take the leaf's strides.

    Attributes:
        gradient: the sum of the gradients that have arrived; None for none.
        parts: what has been added up, in that order, of a leaf whose parts are caught.
    """

    __slots__ = ("_cell", "_node", "parts")

    def __init__(self, leaf: Tensor) -> None:
        # The hook must not refer to this object, which owns the node that owns the hook.
        self._cell: list[Tensor | None] = [None]
        self._node = get_gradient_edge(leaf).node
        self._node.register_prehook(partial(_catch, self._cell))
        self.parts: list[Tensor] = []

    @property
    def gradient(self) -> Tensor | None:
        return self._cell[0]

    def clear(self) -> None:
        """Forget what has arrived."""
        self._cell[0] = None
        self.parts.clear()

    def catch_parts(self, operand: Tensor, made: Sequence[Tensor]) -> None:
        """Catch what goes back from the tensors that a call has made to its operand, which comes from the leaf."""
        end = get_gradient_edge(operand)
        for node, place, edge in edges_before(made, [end]):
            if edge == end:
                node.register_hook(partial(_catch_part, self.parts, place))

    @staticmethod
    @contextmanager
    def paused() -> Iterator[None]:
        """While entered, gradients pass through, as `torch.autograd.grad` needs."""
        _PAUSED.append(True)
        try:
            yield
        finally:
            _PAUSED.pop()


@contextmanager
def parts_kept_back(
    leaves: Sequence[Tensor], roots: Sequence[Tensor | GradientEdge]
) -> Iterator[Sequence[list[Tensor]]]:
    """While entered, what a backward from the roots adds to leaves goes into lists instead, one by one."""
    found: list[list[Tensor]] = [[] for _ in leaves]
    handles: list[Any] = []
    for leaf, parts in zip(leaves, found, strict=True):
        end = get_gradient_edge(leaf)
        for node, place, edge in edges_before(roots, [end]):
            if edge == end:
                handles.append(node.register_hook(partial(_keep_back, parts, place)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _keep_back(parts: list[Tensor], place: int, gradients: Sequence[Tensor | None], _: Any) -> tuple[Any, ...]:
    _catch_part(parts, place, gradients, _)
    return tuple(None if index == place else gradient for index, gradient in enumerate(gradients))


@contextmanager
def caught(leaves: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Catch the leaves' gradients while entered. The list that is yielded holds them afterwards."""
    nodes: list[Node] = [get_gradient_edge(leaf).node for leaf in leaves]
    cells: list[list[Tensor | None]] = [[None] for _ in leaves]
    hooks = [node.register_prehook(partial(_catch, cell)) for node, cell in zip(nodes, cells, strict=True)]
    found: list[Tensor | None] = []
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found.extend(cell[0] for cell in cells)


_PAUSED: list[bool] = []


def _catch_part(parts: list[Tensor], place: int, gradients: Sequence[Tensor | None], _: Any) -> None:
    gradient = gradients[place]
    if gradient is not None and not _PAUSED:
        parts.append(gradient)


def _catch(cell: list[Tensor | None], gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None]:
    [gradient] = gradients
    if _PAUSED:
        return (gradient,)
    if gradient is not None:
        cell[0] = gradient if cell[0] is None else cell[0] + gradient
    return (None,)
