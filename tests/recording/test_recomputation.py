"""Tensors of a checkpointed function are computed again once, and kept until the graph goes."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline.recording.recomputation import recomputed
from lightning_pipeline.recording.split_backward import SplitBackward


def sample(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def test_keeps_nothing_before_and_nothing_after() -> None:
    made: list[weakref.ref[Tensor]] = []

    def body(x: Tensor) -> Tensor:
        h = x * weight
        made.append(weakref.ref(h))
        h = torch.relu(h) @ matrix
        made.append(weakref.ref(h))
        return torch.tanh(h)

    def alive() -> list[bool]:
        return [reference() is not None for reference in made]

    weight, matrix = sample(1, 8).requires_grad_(), sample(2, 8, 8).requires_grad_()
    x = sample(3, 4, 8).requires_grad_()
    expected = torch.autograd.grad(body(x * 1).sum(), [x, weight, matrix])
    made.clear()
    y = recomputed(body, (x * 1,), True)
    saved = weakref.ref(y.grad_fn.next_functions[0][0]._raw_saved_mat2.data.frame)
    assert alive() == [False, False]
    parts = SplitBackward([y.sum()], [None], [get_gradient_edge(x)])
    del y
    (found,) = parts.input_gradients()
    assert saved() is not None and len(made) == 4
    parts.weight_gradients()
    assert saved() is None and len(made) == 4 and not any(alive())
    for one, other in zip((found, weight.grad, matrix.grad), expected, strict=True):
        assert one is not None and torch.equal(one, other)


def test_a_whole_backward_frees_it_node_by_node() -> None:
    layer = nn.Linear(8, 8)
    x = sample(1, 4, 8).requires_grad_()
    y = recomputed(lambda x: torch.sin(layer(x)), (x,), True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    expected = torch.autograd.grad(torch.sin(layer(x)).sum(), x)[0]
    assert x.grad is not None and torch.equal(x.grad, expected)


@pytest.mark.parametrize("early", [True, False])
def test_stops_as_soon_as_all_is_there_if_it_may(early: bool) -> None:
    ends: list[int] = []

    def body(x: Tensor) -> Tensor:
        y = torch.sin(x) + 1
        ends.append(1)
        return y

    x = sample(1, 4).requires_grad_()
    recomputed(body, (x,), early).sum().backward()
    assert len(ends) == (1 if early else 2)


def test_what_differs_the_second_time_is_told() -> None:
    x = sample(1, 4, 8).requires_grad_()
    times: list[int] = []

    def another_shape(x: Tensor) -> Tensor:
        times.append(1)
        return torch.sin(x if len(times) == 1 else x[1:]).sum(0)

    def fewer(x: Tensor) -> Tensor:
        times.append(1)
        return torch.sin(torch.cos(x)) if len(times) == 1 else torch.cos(x)

    for function, message in ((another_shape, "compute the same each time"), (fewer, "2 tensors .* and 1 when")):
        times.clear()
        y = recomputed(function, (x,), True)
        with pytest.raises(CheckpointError, match=message):
            y.sum().backward()
    data = x * 1
    y = recomputed(torch.sin, (data,), True)
    data.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()
