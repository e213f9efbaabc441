"""What crosses a stage's boundary, and its gradient on the way back, keep the strides that they have in one process:
sums are taken in an order that depends on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.engine.gradient_strides import GradientStrides
from lightning_pipeline.engine.microbatch import ArrivedTensor
from lightning_pipeline.partition.memory import laid_out
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.runtime.tensor_meta import TensorMeta, from_memory
from lightning_pipeline.runtime.transport import to_wire
from tests.engine.one_process import assert_equal

BATCHES = [torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(number)) for number in range(3)]
STAGES = {"linear": 0, "channels": 0, "steps": 0, "image": 0, "conv": 0, "head": 1, "norm": 1}


class Network(nn.Module):
    """What the functions below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 24)
        self.channels = nn.BatchNorm1d(24)
        self.steps = nn.BatchNorm1d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.image = nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.rand(24))
        self.head = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(8)


FIRST: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "norm of a transpose": lambda m, x: m.channels(m.linear(x).transpose(1, 2)),
    "transposed norm": lambda m, x: m.steps(m.linear(x)).transpose(1, 2),
    "transposed product": lambda m, x: (m.linear(x) * m.scale).transpose(0, 1),
    "channels last": lambda m, x: m.image(
        m.conv(m.linear(x).view(len(x), 8, 4, 6).to(memory_format=torch.channels_last))
    ),
    "slice": lambda m, x: torch.cat([m.linear(x), m.linear(x * 2)], -1)[..., :24],
    "expanded": lambda m, x: m.linear(x).sum(1, keepdim=True).expand(-1, 8, -1),
}
THEN: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "mean": lambda m, x: (m.head.weight.sum() * x).mean(),
    "cat": lambda m, x: torch.cat([x, x.flip(-1) * m.head.weight.sum()], -1).pow(3).mean(),
    "transposed linear": lambda m, x: m.head(x.transpose(-1, -2) if x.shape[-2] == 24 else x.reshape(-1, 24)).mean(),
    "two uses": lambda m, x: (x.transpose(-1, -2) * m.head.weight.sum()).pow(3).mean() + (x * m.head.bias.sum()).mean(),
    "norm": lambda m, x: m.norm(x if x.shape[1] == 8 and x.dim() == 3 else x.reshape(-1, 8, 24)).pow(3).mean(),
}


PAIRS = list(itertools.product(FIRST, THEN))
OFTEN = [*((first, "two uses") for first in FIRST), *(("transposed norm", then) for then in THEN)]


@pytest.mark.parametrize(
    ("first", "then"), [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in OFTEN)) for pair in PAIRS]
)
def test_what_crosses_a_boundary_ends_in_the_bits_of_one_process(first: str, then: str) -> None:
    assert_equal(Network, STAGES, lambda module, x: THEN[then](module, FIRST[first](module, x)), BATCHES)


LAYOUTS = {
    "contiguous": torch.randn(4, 3, 5),
    "permuted": torch.randn(5, 4, 3).permute(1, 2, 0),
    "slice": torch.randn(4, 6, 7)[:, ::2, 1:6],
    "transposed slice": torch.randn(5, 6, 4).transpose(0, 2)[:, :3],
    "expanded": torch.randn(4, 1, 5).expand(4, 3, 5),
    "one number": torch.randn(()).expand(4, 3, 5),
    "overlapping": torch.randn(20).as_strided((4, 3, 5), (2, 1, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_survives_the_way(name: str) -> None:
    tensor = LAYOUTS[name]
    came = torch.empty_strided(TensorMeta.of(tensor).shape, TensorMeta.of(tensor).stride).copy_(tensor)
    for found in (
        laid_out(came, tensor.stride()),
        from_memory(to_wire(tensor, came.device).view(4, 3, 5), tensor.stride()),
    ):
        assert found.equal(tensor)
        assert found.stride() == tensor.stride()


def _exchanged(sender: GradientStrides, receiver: GradientStrides, gradient: Tensor) -> tuple[Tensor, bool]:
    """What arrives of a gradient, and whether a message preceded it."""
    message = sender.announce([gradient])
    [sent] = sender.to_send([gradient])
    assert receiver.can_post()
    arriving = receiver.post(lambda meta: ArrivedTensor(message))
    assert (arriving is None) == (message is None)
    [stride] = receiver.strides(arriving, "a gradient")
    memory = to_wire(sent, sent.device).view(receiver.metas[0].shape)
    return from_memory(memory, stride), message is not None


def test_dense_strides_are_told_once() -> None:
    specs = [TensorSpec.of(LAYOUTS["contiguous"])]
    sender, receiver = GradientStrides(specs), GradientStrides(specs)
    for name, is_told in (("permuted", True), ("permuted", False), ("contiguous", False), ("expanded", False)):
        found, came_after_message = _exchanged(sender, receiver, LAYOUTS[name])
        assert found.equal(LAYOUTS[name]) and found.stride() == LAYOUTS["permuted"].stride()
        assert came_after_message == is_told


def test_others_are_told_every_time() -> None:
    specs = [TensorSpec.of(LAYOUTS["contiguous"])]
    sender, receiver = GradientStrides(specs), GradientStrides(specs)
    for name in ("one number", "permuted", "expanded", "slice"):
        found, came_after_message = _exchanged(sender, receiver, LAYOUTS[name])
        assert found.equal(LAYOUTS[name]) and found.stride() == LAYOUTS[name].stride()
        assert came_after_message


def test_nothing_is_posted_before_it_is_known_whether_a_message_comes() -> None:
    receiver = GradientStrides([TensorSpec.of(LAYOUTS["contiguous"])])
    message = torch.tensor(LAYOUTS["permuted"].stride())
    receiver.post(lambda meta: ArrivedTensor(message))
    assert not receiver.can_post()
    receiver.hear("a gradient")
    assert receiver.can_post()
    assert receiver.post(lambda meta: ArrivedTensor(message)) is None


def test_numbers_need_no_strides() -> None:
    strides = GradientStrides([TensorSpec.of(torch.tensor(1.0))])
    assert strides.announce([torch.tensor(2.0)]) is None
    assert strides.strides(None, "a gradient") == [()]
