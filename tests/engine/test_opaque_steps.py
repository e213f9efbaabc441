"""Functions that a recording cannot look into, and memory that tensors share, on stages."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.engine.one_process import assert_equal, on_stages

STAGES = {"layers.2": 1}
BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(4)]


class Scaled(torch.autograd.Function):
    """Arguments that are no tensors, several outputs, `setup_context`."""

    @staticmethod
    def forward(x: Tensor, factor: float, name: str) -> tuple[Tensor, Tensor, str]:
        return x * factor, x.sum(), name

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor, _: Any) -> Any:
        return one * -ctx.factor + other * ctx.saved_tensors[0].sign(), None, None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def of(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = nn.Module()
        module.layers = nn.ModuleList([layer() for _ in range(4)])
        return module

    return make


def step(module: Any, x: Tensor) -> Tensor:
    for layer in module.layers:
        x = x + layer(x)
    return x.pow(2).mean()


class With(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.view(-1, 4, 2), [4, 2, 3, 1], batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0].reshape(x.shape)


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "a function of autograd": lambda: With(lambda x: sum(Scaled.apply(x, 0.3, "name")[:2])),
    "one that writes": lambda: With(lambda x: Doubled.apply(x * 1)),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "packed sequences": Packed,
    "compiled": lambda: torch.compile(nn.Sequential(linear(), nn.Tanh()), backend="aot_eager"),  # type: ignore[dict-item]
    "as many as the data says": lambda: With(lambda x: x * x.round().unique().numel()),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compiled")) for n in LAYERS])
def test_equals_one_process(name: str) -> None:
    assert_equal(of(LAYERS[name]), STAGES, step, BATCHES)


def an_array(x: Tensor) -> Tensor:
    array = np.ones(tuple(x.shape), np.float32)
    found = x + torch.from_numpy(array)
    array[0] = 5
    return found


def test_an_array_changes_after_its_tensor_was_used() -> None:
    assert_equal(of(lambda: With(an_array)), STAGES, step, BATCHES)


def into_a_view(x: Tensor) -> Tensor:
    buffer = torch.zeros(x.shape)
    buffer[1:][0] = x[0]
    view = buffer[2]
    view.copy_(x[0])
    return x + buffer


def test_a_view_of_what_every_rank_has_is_written_into() -> None:
    gc.collect()
    gc.freeze()  # views are searched for, many times, among all objects but these
    assert_equal(of(lambda: With(into_a_view)), STAGES, step, BATCHES)


def into_memory_of_an_array(x: Tensor) -> Tensor:
    buffer = torch.zeros(x.shape)
    array = buffer.numpy()
    buffer[2] = x[0]
    return x + float(array[0, 0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (into_memory_of_an_array, "shares its memory"),
        (lambda x: x * torch.bernoulli(x.sigmoid(), generator=torch.Generator()), "from a generator of the user's"),
        (lambda x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y, (x,)), "torch.where"),
    ],
)
def test_what_cannot_be_had_names_the_line(function: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message) as raised:
        on_stages(of(lambda: With(function))(), STAGES, step, BATCHES)
    assert "test_opaque_steps.py" in str(raised.value)


@pytest.mark.parametrize("layer", [linear, lambda: nn.BatchNorm1d(6, affine=False)], ids=["parameters", "buffers"])
def test_a_scripted_module_with_tensors_is_refused(layer: Callable[[], nn.Module]) -> None:
    with pytest.raises(NotImplementedError, match=r"layers\.0 is a scripted"):
        on_stages(of(lambda: torch.jit.script(layer()))(), STAGES, step, BATCHES)
