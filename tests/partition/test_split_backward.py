"""Backward in two parts is to the bit the whole backward."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.partition.split_backward import SplitBackward

Step = Callable[[nn.Module, Tensor], "Tensor | Sequence[Tensor]"]


class Entry(torch.autograd.Function):
    """How received values enter the graph; its own backward is not to run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.mark_dirty(*tensors)
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        assert all(gradient is None for gradient in gradients), "backward went past the inputs"
        return (None,) * (len(gradients) + 1)


def enter(*tensors: Tensor, leaf: bool = False) -> tuple[list[Tensor], list[GradientEdge]]:
    entered = [tensor.clone().requires_grad_(leaf) for tensor in tensors]
    if not leaf:
        Entry.apply(torch.empty(0, requires_grad=True), *entered)
    return entered, [get_gradient_edge(tensor) for tensor in entered]


def sample(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def as_roots(result: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    roots = [result] if isinstance(result, Tensor) else list(result)
    return roots, [None if root.dim() == 0 else sample(50 + n, *root.shape) for n, root in enumerate(roots)]


def whole(module: nn.Module, step: Step, inputs: Sequence[Tensor]) -> list[list[Tensor | None]]:
    """The inputs' gradients of each micro-batch; the module's are on it."""
    found = []
    for number, data in enumerate(inputs):
        torch.manual_seed(number)
        x = data.clone().requires_grad_()
        torch.autograd.backward(*as_roots(step(module, x * 1)))  # type: ignore[arg-type]
        found.append([x.grad])
    return found


def split(
    module: nn.Module, step: Step, inputs: Sequence[Tensor], *, order: str = "", leaf: bool = False
) -> list[list[Tensor | None]]:
    """The same in two parts; `order`, of "I0 I1 W0 ...", of the parts (default: one micro-batch after the other)."""
    found: list[list[Tensor | None]] = [[] for _ in inputs]
    parts: dict[int, SplitBackward] = {}
    for action in (order or " ".join(f"I{n} W{n}" for n in range(len(inputs)))).split():
        number = int(action[1:])
        if action[0] == "I":
            torch.manual_seed(number)
            (x,), edges = enter(inputs[number], leaf=leaf)
            roots, gradients = as_roots(step(module, x))
            before = gradients_of(module)
            parts[number] = SplitBackward(roots, gradients, edges)
            found[number] = list(parts[number].input_gradients())
            assert same(before, gradients_of(module)), "the first part added to a leaf's gradient"
            if leaf:
                assert x.grad is None
        else:
            parts.pop(number).weight_gradients()
    return found


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other


def check(module: nn.Module, step: Step, *shape: int, order: str = "", leaf: bool = False) -> dict[str, Tensor | None]:
    """Three micro-batches have the same bits, whole and in two parts; returns the gradients."""
    inputs = [sample(number, *shape) for number in range(3)]
    other = copy.deepcopy(module)
    expected = whole(module, step, inputs)
    found = split(other, step, inputs, order=order, leaf=leaf)
    assert same(found, expected)
    assert any(gradient is not None and gradient.any() for row in expected for gradient in row)
    assert same(gradients_of(other), gradients_of(module))
    return gradients_of(module)


# -- modules ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln1(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln2(x))


class Twice(torch.autograd.Function):
    """x @ weight + bias, counting the calls of its backward."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, factor: float, weight: Tensor, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x, mask)
        ctx.factor = factor
        return factor * (x * mask) @ weight + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Twice.calls += 1
        weight, x, mask = ctx.saved_tensors
        scaled = ctx.factor * gradient
        return None, (x * mask).T @ scaled, scaled @ weight.T * mask, None, gradient.sum(0)


class Plain(nn.Module):
    """Parameters without a module of their own."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(sample(90 + number, *shape)))


def several_uses(m: Any, x: Tensor) -> Tensor:
    """`w` comes to its sum by ways of many kinds."""
    h = torch.tanh(F.linear(x, m.w))
    h = torch.tanh(F.linear(h + m.v, m.w)) * m.v
    return torch.tanh(F.linear(h, m.w * m.v)) + m.v


def in_place(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h[:, 0] += m.v[0]
    h[:, 1:].mul_(m.v[1:])
    return h.sin()


def custom_function(m: Any, x: Tensor) -> Tensor:
    h = Twice.apply(2.0, m.w, x, torch.ones(8), m.v)
    return Twice.apply(0.5, m.w, h, torch.ones(8), m.u)  # w is used twice


def two_roots(m: Any, x: Tensor) -> list[Tensor]:
    """The second root leads to the input by another way; the third and fourth do not lead there."""
    h = F.linear(x, m.w)
    return [F.linear(h, m.u), h * m.v, F.linear(m.u, m.w).sin(), m.v * 2]


def root_used(m: Any, x: Tensor) -> list[Tensor]:
    """A root beside the way that is used on the way, too; the input is a root as well."""
    bias = m.v.exp()
    return [F.linear(x + bias, m.w) + bias, bias, x]


def embedding(m: Any, x: Tensor) -> Tensor:
    ids = torch.arange(6) % 5
    return F.linear(x + F.embedding(ids, m.w), m.w)


SEQUENCES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}


def modules() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    weight_norm = nn.utils.parametrizations.weight_norm
    spectral_norm = nn.utils.parametrizations.spectral_norm
    shared = nn.Linear(8, 8)
    return {
        "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (4, 8)),
        "no way aside": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), (4, 8)),
        "transformer": (lambda: nn.Sequential(Block(), Block()), (2, 6, 16)),
        "conv": (
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)
            ),
            (2, 3, 8, 8),
        ),
        "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)), (4, 8)),
        "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)), (4, 8)),
        "a module three times": (lambda: nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared), (4, 8)),
        "rnn": (lambda: First(nn.LSTM(8, 8, num_layers=2)), (5, 2, 8)),
        "torch's encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 6, 16)),
    }


class First(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


def run(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


@pytest.mark.parametrize("leaf", [False, True], ids=["function", "leaf"])
@pytest.mark.parametrize("name", modules())
def test_modules(name: str, leaf: bool) -> None:
    torch.manual_seed(0)
    build, shape = modules()[name]
    gradients = check(build(), run, *shape, leaf=leaf)
    assert all(gradient is not None for gradient in gradients.values())


@pytest.mark.parametrize("step", [several_uses, in_place, custom_function, two_roots, root_used, embedding])
def test_parameters_without_a_module(step: Step) -> None:
    shapes = {"w": (8, 8), "v": (8,), "u": (8, 8)}
    if step is custom_function:
        shapes["u"] = (8,)
    check(Plain(**shapes), step, 6, 8)
    check(Plain(**shapes), step, 6, 8, order="I0 I1 W0 I2 W1 W2")
