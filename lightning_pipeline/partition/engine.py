"""Calls of autograd's engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


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
