"""Backward by autograd's engine is that of torch's public functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_pipeline.recording.backward_calls import backward_from, backward_from_loss


def gradients(module: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_loss(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(8, 8).to(dtype), torch.rand(2, 8, dtype=dtype)
    module(x).square().mean().backward()
    expected = gradients(module)
    backward_from_loss(module(x).square().mean())
    for mine, one in zip(gradients(module), expected, strict=True):
        assert torch.equal(mine, one)


def test_a_place_in_the_graph_without_its_tensor() -> None:
    torch.manual_seed(0)
    module, x, gradient = nn.Linear(8, 8), torch.rand(2, 8), torch.rand(2, 8)
    module(x).backward(gradient)
    expected = gradients(module)
    backward_from([get_gradient_edge(module(x))], [gradient])
    for mine, one in zip(gradients(module), expected, strict=True):
        assert torch.equal(mine, one)


def test_a_loss_of_a_class_of_the_users_runs_its_own_backward() -> None:
    class Loss(Tensor):
        called = 0

        def backward(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            Loss.called += 1
            super().backward(*args, **kwargs)  # type: ignore[arg-type]

    x = torch.rand(3, requires_grad=True)
    backward_from_loss(x.sum().as_subclass(Loss))
    assert Loss.called == 1 and torch.equal(x.grad, torch.ones(3))


def test_losses_without_a_gradient_are_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward_from_loss(torch.zeros(()))
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for real scalar outputs"):
        backward_from_loss(torch.zeros((), dtype=torch.complex64, requires_grad=True) * 2)
