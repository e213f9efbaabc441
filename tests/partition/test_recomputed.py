"""Checkpointed functions whose recomputation is kept, for backwards in two parts."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.recompute import recomputation
from lightning_pipeline.partition.split_backward import SplitBackward


class Modules:
    """An interception outside of replays."""

    def between_modules(self) -> bool:
        return False

    def checkpoint_leaves(self, more: int) -> None:
        raise AssertionError


def sample(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


class Layer(nn.Module):
    """Counts its calls; the module `kind` says how it is checkpointed."""

    def __init__(self, kind: str, inner: str = "") -> None:
        super().__init__()
        self.kind, self.inner = kind, inner
        self.ln, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed(self.kind, self.body, x)

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.dropout(torch.nn.functional.gelu(self.up(self.ln(x))), 0.2, True)
        return x + checkpointed(self.inner, self.down, h)


def checkpointed(kind: str, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=kind == "reentrant") if kind else function(x)


def split(module: nn.Module, data: Tensor, *, autocast: bool = False) -> Tensor:
    torch.manual_seed(0)
    x = data.clone().requires_grad_()
    with recomputation(Streams(torch.device("cpu")), Modules(), keep=True):
        edges = [get_gradient_edge(x)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(x)
        random = torch.get_rng_state()
        parts = SplitBackward([y.float().square().sum()], [None], edges)
        (gradient,) = parts.input_gradients()
        parts.weight_gradients()
        assert torch.equal(random, torch.get_rng_state())
    assert gradient is not None
    return gradient


def whole(module: nn.Module, data: Tensor, *, autocast: bool = False) -> Tensor:
    torch.manual_seed(0)
    x = data.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("inner", ["", "plain", "reentrant"])
@pytest.mark.parametrize("kind", ["plain", "reentrant"])
def test_is_computed_again_once(kind: str, inner: str, autocast: bool) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 8), Layer(kind, inner), Layer(kind, inner), nn.Linear(8, 8))
    other = copy.deepcopy(module)
    plain = copy.deepcopy(module)
    for layer in (plain[1], plain[2]):
        layer.kind = layer.inner = ""
    data = sample(1, 4, 8)
    expected = whole(plain, data, autocast=autocast)
    assert torch.equal(split(other, data, autocast=autocast), expected)
    for one, two in zip(other.parameters(), plain.parameters(), strict=True):
        assert two.grad is not None and one.grad is not None and torch.equal(one.grad, two.grad)
    assert [other[1].calls, other[2].calls] == [2, 2]


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
    edges = [get_gradient_edge(x)]
    with recomputation(Streams(torch.device("cpu")), Modules(), keep=True):
        y = checkpoint(body, x * 1, use_reentrant=False)
        saved = weakref.ref(y.grad_fn.next_functions[0][0]._raw_saved_mat2.data._frame)
        assert alive() == [False, False]
        parts = SplitBackward([y.sum()], [None], edges)
        del y
        parts.input_gradients()
        assert saved() is not None and len(made) == 4
        parts.weight_gradients()
        assert saved() is None and len(made) == 4 and not any(alive())


def test_a_whole_backward_frees_it_node_by_node() -> None:
    layer = nn.Linear(8, 8)
    x = sample(1, 4, 8).requires_grad_()
    with recomputation(Streams(torch.device("cpu")), Modules(), keep=True):
        y = checkpoint(lambda x: torch.sin(layer(x)), x, use_reentrant=False)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
    expected = torch.autograd.grad(torch.sin(layer(x)).sum(), x)[0]
    assert x.grad is not None and torch.equal(x.grad, expected)


def test_without_a_gradient_nothing_is_done() -> None:
    with recomputation(Streams(torch.device("cpu")), Modules(), keep=True):
        layer = nn.Linear(8, 8)
        with torch.no_grad():
            assert not checkpoint(layer, sample(1, 4, 8), use_reentrant=False).requires_grad
        with pytest.warns(UserWarning, match="None of the inputs"):
            assert not checkpoint(layer, sample(1, 4, 8), use_reentrant=True).requires_grad
        assert checkpoint(layer, sample(1, 4, 8), use_reentrant=False).requires_grad


@pytest.mark.parametrize("early", [True, False])
def test_stops_as_soon_as_all_is_there_if_it_may(early: bool) -> None:
    ends: list[int] = []

    def body(x: Tensor) -> Tensor:
        y = torch.sin(x) + 1
        ends.append(1)
        return y

    x = sample(1, 4).requires_grad_()
    with recomputation(Streams(torch.device("cpu")), Modules(), keep=True), set_checkpoint_early_stop(early):
        checkpoint(body, x, use_reentrant=False).sum().backward()
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

    with recomputation(Streams(torch.device("cpu")), Modules(), keep=True):
        for function, message in ((another_shape, "compute the same each time"), (fewer, "2 tensors .* and 1 when")):
            times.clear()
            y = checkpoint(function, x, use_reentrant=False)
            with pytest.raises(CheckpointError, match=message):
                y.sum().backward()
        data = x * 1
        y = checkpoint(torch.sin, data, use_reentrant=False)
        data.add_(1)
        with pytest.raises(RuntimeError, match="modified in place"):
            y.sum().backward()


def test_options_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selective checkpointing keeps what its policy says; keyword arguments reach the function."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    layer = nn.Linear(8, 8)
    x = sample(1, 4, 8).requires_grad_()

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def body(x: Tensor, *, factor: float) -> Tensor:
        return torch.sin(layer(x) * factor)

    expected = torch.autograd.grad(body(x, factor=2.0).sum(), [x, layer.weight])
    with recomputation(Streams(torch.device("cpu")), Modules(), keep=True):
        y = checkpoint(
            body,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
            preserve_rng_state=False,
            determinism_check="none",
            factor=2.0,
        )
        parts = SplitBackward([y.sum()], [None], [get_gradient_edge(x)])
        (found,) = parts.input_gradients()
        with torch.profiler.profile() as profile:
            parts.weight_gradients()
    assert "aten::addmm" not in {event.key for event in profile.key_averages()}
    assert found is not None and torch.equal(found, expected[0])
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, expected[1])
