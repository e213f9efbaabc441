"""Results are inferred with the strides that they have on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.partition.torch_functions import FunctionKind, kind_of
from lightning_pipeline.recording import inference
from lightning_pipeline.recording.inference import Inference
from lightning_pipeline.recording.operation import take_apart

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
    fake = inference.fake(TensorSpec.of(given))
    with inference.mode:
        found = FUNCTIONS[name](fake)
    assert found.stride() == FUNCTIONS[name](given).stride()


CALLS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    "roll": ("channels last", torch.roll, ((1, 2), (1, 3))),
    "one hot": ("transposed", lambda x, n: F.one_hot(x.long() % n, n), (3,)),
    "max pool": ("transposed", F.max_pool1d, (2,)),
    "max unpool": ("channels last", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), ()),
    "reflected": ("channels last", F.pad, ((1, 1, 1, 1), "reflect")),
    "shuffled": ("channels last", F.channel_shuffle, (2,)),
    "divided": ("permuted", lambda x: torch.div(x, torch.tensor(2.0), rounding_mode="floor"), ()),
    "logs of sums": ("transposed", lambda x: torch.logaddexp(x.mean(1, keepdim=True), x[0]), ()),
    "both": ("transposed", lambda x: torch.logical_and(x[:, :1].contiguous(), x[0]), ()),
    "x log y": ("permuted", lambda x: torch.xlogy(x, x[0]), ()),
    "leaky at random": ("permuted", lambda x: F.rrelu(x, training=True), ()),
    "no reduction": ("heads", lambda x: F.nll_loss(x, torch.zeros_like(x[:, 0]).long(), reduction="none"), ()),
    "one pixel": ("one pixel", lambda x: x + x.contiguous(), ()),
    "a sum of one pixel": ("one pixel", torch.add, (torch.ones(2, 4, 1, 1),)),
}
ONE_PIXEL = torch.randn(2, 4, 1, 1).to(memory_format=torch.channels_last)


class _Inferred(TorchFunctionMode):
    """Compares what is inferred of each call with what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inference = Inference()
        self.compared: list[tuple[Any, tuple[int, ...], tuple[int, ...] | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = take_apart(func, args, kwargs or {})
        if not call.tensors or kind_of(func) is FunctionKind.DESCRIBES:
            return func(*args, **(kwargs or {}))
        result = self.inference.result(func, call, [TensorSpec.of(tensor) for tensor in call.tensors])
        found = func(*args, **(kwargs or {}))
        assert result is not None
        for tensor, spec in zip(tree.leaves(found), result.tensors, strict=True):
            if isinstance(spec, TensorSpec):
                self.compared.append((func, tensor.stride(), spec.stride))
        return found


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_inferred_as_they_come_out(name: str, needs_grad: bool) -> None:
    layout, function, arguments = CALLS[name]
    given = (ONE_PIXEL if layout == "one pixel" else INPUTS[layout]).detach().requires_grad_(needs_grad)
    before = torch.default_generator.get_state()
    with _Inferred() as mode:
        function(given, *arguments)
    assert mode.compared
    assert all(found == inferred for _, found, inferred in mode.compared), mode.compared
    if name != "leaky at random":
        assert torch.default_generator.get_state().equal(before)


def test_nothing_is_drawn_to_infer() -> None:
    before = torch.default_generator.get_state()
    call = take_apart(F.rrelu, (INPUTS["dense"],), {"training": True})
    Inference().result(F.rrelu, call, [TensorSpec.of(INPUTS["dense"])])
    assert torch.default_generator.get_state().equal(before)


def test_what_is_large_is_not_computed_to_infer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inference, "_on_zeros", lambda *_: pytest.fail("computed"))
    large = torch.empty(1024, 1024, device="meta")
    spec = TensorSpec.of(torch.empty(2, 2)).but(shape=large.shape, stride=large.stride())
    assert spec.num_bytes > inference._SMALL
    result = Inference().result(F.relu, take_apart(F.relu, (large,), {}), [spec])
    assert result is not None and result.tensors == (spec,)
