"""Results are inferred with the strides that they have on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline.partition.inference import Inference
from lightning_pipeline.partition.placeholder import Look

INPUTS = {
    "transposed": torch.randn(2, 4, 8).transpose(1, 2),
    "permuted": torch.randn(4, 2, 8).transpose(0, 1),
    "dense": torch.randn(2, 4, 8),
    "channels last": torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last),
    "heads": torch.randn(2, 8, 4, 8).transpose(1, 2),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), training=True),
    "batch norm in evaluation": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    "log sigmoid": F.logsigmoid,
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x, 2),
    "instance norm": F.instance_norm,
    "softmax": lambda x: F.softmax(x, 1),
    "relu": F.relu,
    "gelu": F.gelu,
    "linear": lambda x: F.linear(x, torch.ones(5, x.shape[-1])),
    "sum": lambda x: x + torch.ones(x.shape),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_are_those_of_the_cpu(name: str, layout: str, needs_grad: bool) -> None:
    given = INPUTS[layout].detach().requires_grad_(needs_grad)
    inference = Inference()
    fake = inference.fake(Look.of(given))
    with inference.mode:
        found = FUNCTIONS[name](fake)
    assert found.stride() == FUNCTIONS[name](given).stride()
