"""Calls of autograd's engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge


def backward_from(
    roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None], *, retain_graph: bool = False
) -> None:
    """What `torch.autograd.backward` comes to where each root has a gradient of its own shape and dtype.

    It makes sure of that first, which takes as long as a small layer's backward; gradients that another stage sent are
    what was asked for.
    """
    _engine_run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_from_loss(loss: Tensor, *, retain_graph: bool = False) -> None:
    """What ``loss.backward()`` comes to for a loss without dimensions."""
    if type(loss) is Tensor and loss.is_floating_point():
        backward_from((loss,), (torch.ones_like(loss),), retain_graph=retain_graph)
    else:
        loss.backward(retain_graph=retain_graph)


class Caught:
    """What comes to a leaf in backward instead of its `.grad`, which would have the leaf's strides: as it is.

    Attributes:
        gradient: the sum of it.
    """

    __slots__ = ("_cell", "_node")

    def __init__(self, leaf: Tensor) -> None:
        self._cell: list[Tensor | None] = [None]  # and not this object, which owns the node that owns the hook
        self._node = get_gradient_edge(leaf).node
        self._node.register_prehook(partial(_catch, self._cell))

    @property
    def gradient(self) -> Tensor | None:
        return self._cell[0]

    def clear(self) -> None:
        """Forget what has come."""
        self._cell[0] = None


@contextmanager
def caught(leaves: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """While entered, what comes to leaves in backward goes into the list that is given, as with `Caught`."""
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


def _catch(cell: list[Tensor | None], gradients: tuple[Tensor | None, ...]) -> tuple[None]:
    [gradient] = gradients
    if gradient is not None:
        cell[0] = gradient if cell[0] is None else cell[0] + gradient
    return (None,)
