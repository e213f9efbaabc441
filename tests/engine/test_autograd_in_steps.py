"""Hooks on gradients, and gradients that a step asks for itself, on stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.one_process import assert_equal, on_stages

STAGES = {"layers.2": 1}
BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(4)]


def network() -> nn.Module:
    module = nn.Module()
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8)) for _ in range(4)]
    module.layers = nn.ModuleList(layers)
    return module


def with_after(layer: int, function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A step that does something to what a layer gives."""

    def step(module: Any, x: Tensor) -> Tensor:
        for number, each in enumerate(module.layers):
            x = x + each(x)
            if number == layer:
                x = function(module, x)
        return x.pow(2).mean()

    return step


# -- hooks -------------------------------------------------------------------------------------------------------------


def scaled(module: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 0.5)
    return x


def with_values(module: Any, x: Tensor) -> Tensor:
    """What a hook refers to has its data."""
    factor = x.detach().abs()
    x.register_hook(lambda gradient: gradient * factor + module.layers[0][0].weight.mean())
    return x


def noisy(module: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    x.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
    return x


def removed(module: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 0.5).remove()
    return x


def of_node(module: Any, x: Tensor) -> Tensor:
    x = x * 1
    x.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 2, *inputs[1:]))  # type: ignore[union-attr]
    x.grad_fn.register_prehook(lambda outputs: (outputs[0] + 0.1,))  # type: ignore[union-attr]
    return x


@pytest.mark.parametrize("layer", [1, *(pytest.param(layer, marks=pytest.mark.slow) for layer in (0, 2))])
@pytest.mark.parametrize("function", [scaled, with_values, noisy, removed, of_node])
def test_hooks_on_values(function: Any, layer: int) -> None:
    assert_equal(network, STAGES, with_after(layer, function), BATCHES, in_order=True)


@pytest.mark.parametrize(
    "name", ["layers.1", "layers.2.0", *(pytest.param(n, marks=pytest.mark.slow) for n in ("layers.0", "layers.3"))]
)
def test_hooks_on_modules(name: str) -> None:
    def make() -> nn.Module:
        module = network()
        hooked = module.get_submodule(name)
        hooked.register_full_backward_hook(lambda _, inputs, __: tuple(g if g is None else g * 0.7 for g in inputs))
        hooked.register_full_backward_pre_hook(lambda _, outputs: tuple(g * 0.9 for g in outputs))
        return module

    def step(module: Any, x: Tensor) -> Tensor:
        x.requires_grad_()
        for each in module.layers:
            x = x + each(x)
        return x.pow(2).mean()

    assert_equal(make, STAGES, step, BATCHES, in_order=True)


def test_a_hook_sees_what_one_process_sees() -> None:
    def run(**how: Any) -> list[float]:
        seen: list[float] = []

        def noted(module: Any, x: Tensor) -> Tensor:
            x.register_hook(lambda gradient: seen.append(float(gradient.sum())))
            return x

        torch.manual_seed(0)
        on_stages(network(), STAGES, with_after(1, noted), BATCHES, **how)
        return seen

    expected = run(alone=True)
    assert len(expected) == 8
    assert run() == expected


# -- gradients within a step -------------------------------------------------------------------------------------------


def penalty(module: Any, x: Tensor) -> Tensor:
    [gradient] = torch.autograd.grad(module.layers[3](x).sum(), x, create_graph=True)
    return x + (gradient.norm(dim=1, keepdim=True) - 1) ** 2


def of_parameters(module: Any, x: Tensor) -> Tensor:
    own = [module.layers[3][0].weight, module.layers[3][3].weight]
    gradients = torch.autograd.grad(module.layers[3](x).pow(2).mean(), own, create_graph=True)
    return x + sum(each.pow(2).sum() for each in gradients)


def without_a_graph(module: Any, x: Tensor) -> Tensor:
    y = module.layers[3](x)
    return x + torch.autograd.grad(y, x, torch.ones_like(y))[0]


def own_backward(module: Any, x: Tensor) -> Tensor:
    module.layers[3](x.detach()).pow(2).mean().backward()
    return x


@pytest.mark.parametrize("layer", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [penalty, of_parameters, without_a_graph, own_backward])
def test_gradients_within_a_stage(function: Any, layer: int) -> None:
    is_in_order = function is own_backward
    assert_equal(network, STAGES, with_after(layer, function), BATCHES, in_order=is_in_order)


def test_a_penalty_on_what_an_earlier_stage_gives() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        features = module.layers[1](module.layers[0](x))
        scores = module.layers[3](module.layers[2](features)).tanh()
        [gradient] = torch.autograd.grad(scores.sum(), features, create_graph=True)
        return scores.pow(2).mean() + (gradient.norm(dim=1) - 1).pow(2).mean()

    assert_equal(network, STAGES, step, BATCHES, in_order=False)


def test_a_penalty_on_the_batch() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        mixed = x.clone().requires_grad_()
        [gradient] = torch.autograd.grad(module.layers[0](mixed).sum(), mixed, create_graph=True)
        return with_after(9, penalty)(module, x) + (gradient.norm(dim=1) - 1).pow(2).mean()

    assert_equal(network, STAGES, step, BATCHES, in_order=False)


def across(module: Any, x: Tensor) -> Tensor:
    return x + torch.autograd.grad(x.sum(), module.layers[0][0].weight, retain_graph=True)[0].norm()


def backward_across(module: Any, x: Tensor) -> Tensor:
    x.sum().backward(retain_graph=True)
    return x


def reading(module: Any, x: Tensor) -> Tensor:
    return x if module.layers[0][0].weight.grad is None else x * 2


@pytest.mark.parametrize(
    ("function", "message"),
    [(across, "stages 0 and 1"), (backward_across, "stages 0 and 1"), (reading, "on_after_backward")],
)
def test_what_cannot_be_had_names_the_line(function: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message) as raised:
        on_stages(network(), STAGES, with_after(3, function), BATCHES)
    assert "test_autograd_in_steps.py" in str(raised.value)
