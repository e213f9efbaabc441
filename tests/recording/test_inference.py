"""Results are inferred with the strides that they have on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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


SQUARE = torch.randn(8, 8)
OF_ZEROS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "linear": (F.linear, (torch.randn(5, 8), torch.randn(5)), {}),
    "matmul": (torch.matmul, (SQUARE,), {}),
    "__matmul__": (Tensor.__matmul__, (SQUARE,), {}),
    "bmm": (torch.bmm, (torch.randn(8, 4, 8).transpose(1, 2)[:2],), {}),
    "addmm": (torch.addmm, (SQUARE, torch.randn(8, 8).t()), {}),
    "baddbmm": (torch.baddbmm, (torch.randn(2, 4, 8), SQUARE.expand(2, 8, 8)), {}),
    "conv1d": (F.conv1d, (torch.randn(3, 4, 3), torch.randn(3)), {"padding": 1}),
    "conv2d": (F.conv2d, (torch.randn(3, 4, 3, 3),), {"stride": 2, "padding": 1}),
    "batch_norm": (F.batch_norm, (torch.zeros(4), torch.ones(4), torch.ones(4)), {"training": True}),
    "layer_norm": (F.layer_norm, ((8,), torch.ones(8), torch.zeros(8)), {}),
    "group_norm": (F.group_norm, (2,), {}),
    **{name: (getattr(F, name), (), {}) for name in ("relu", "gelu", "silu", "leaky_relu", "elu", "softplus")},
    **{name: (getattr(torch, name), (), {}) for name in ("tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "square")},
    **{name: (getattr(torch, name), (), {}) for name in ("sin", "cos", "abs", "neg", "sign", "detach", "clone")},
    "log_sigmoid": (F.logsigmoid, (), {}),
    "softmax": (F.softmax, (1,), {"dtype": torch.float64}),
    "log_softmax": (F.log_softmax, (-1,), {}),
    **{name: (getattr(F, name), (torch.randn(2, 4, 8),), {}) for name in ("mse_loss", "l1_loss", "smooth_l1_loss")},
    "cross_entropy": (F.cross_entropy, (torch.zeros(2, 8).long(),), {"reduction": "none", "label_smoothing": 0.1}),
    "nll_loss": (F.nll_loss, (torch.zeros(2, 8).long(),), {}),
    "pow": (torch.pow, (2,), {}),
    "__pow__": (Tensor.__pow__, (0.5,), {}),
    "__neg__": (Tensor.__neg__, (), {}),
    "clamp": (torch.clamp, (), {"min": 0.0}),
    **{name: (getattr(Tensor, name), (torch.randn(4, 1),), {}) for name in ("add", "sub", "mul", "div")},
    **{f"__{name}__": (getattr(Tensor, f"__{name}__"), (SQUARE[:1],), {}) for name in ("add", "sub", "mul", "truediv")},
    **{f"__r{name}__": (getattr(Tensor, f"__r{name}__"), (2,), {}) for name in ("add", "sub", "mul", "truediv", "div")},
    "sum": (torch.sum, (1,), {"keepdim": True}),
    **{name: (getattr(torch, name), (-1,), {}) for name in ("mean", "amax", "amin", "unbind")},
    "norm": (torch.norm, (), {"dim": 1}),
    "view": (Tensor.view, (2, 4, 2, -1), {}),
    "reshape": (torch.reshape, ((-1, 2),), {}),
    "flatten": (torch.flatten, (1,), {}),
    "transpose": (torch.transpose, (1, 2), {}),
    "permute": (torch.permute, ((2, 0, 1),), {}),
    "unsqueeze": (torch.unsqueeze, (1,), {}),
    "squeeze": (torch.squeeze, (), {}),
    "expand": (Tensor.expand, (3, -1, -1, -1), {}),
    "contiguous": (Tensor.contiguous, (), {}),
    "T.__get__": (Tensor.T.__get__, (), {}),  # type: ignore[attr-defined]
    "mT.__get__": (Tensor.mT.__get__, (), {}),  # type: ignore[attr-defined]
    "t": (torch.t, (), {}),
    "chunk": (torch.chunk, (2, 1), {}),
    "split": (torch.split, ([3, 5],), {"dim": -1}),
    "__getitem__": (Tensor.__getitem__, ((slice(None), None, 1, slice(None, None, 2)),), {}),
    **{name: (getattr(Tensor, name), (), {}) for name in ("float", "double", "half", "bfloat16", "relu_")},
    **{name: (getattr(Tensor, name), (torch.ones(8),), {}) for name in ("add_", "sub_", "mul_", "div_", "copy_")},
    "zero_": (Tensor.zero_, (), {}),
    "fill_": (Tensor.fill_, (2.0,), {}),
    "embedding": (F.embedding, (torch.randn(7, 5),), {}),
    "dropout": (F.dropout, (0.5,), {}),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, (INPUTS["heads"],) * 2, {"dropout_p": 0.1}),
    "cat": (lambda x: torch.cat([x, x], 1), (), {}),
    "stack": (lambda x: torch.stack([x, x], -1), (), {}),
}
OF_OTHER_SHAPES = {
    "addmm": SQUARE.t(),
    "t": SQUARE,
    "T.__get__": SQUARE,
    "conv2d": INPUTS["channels last"],
    "scaled_dot_product_attention": INPUTS["heads"],
    "embedding": torch.zeros(2, 3, dtype=torch.int64),
}


class _Noted(TorchFunctionMode):
    """Notes the calls that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", sorted(inference._TOLD_BY_ZEROS))
def test_zeros_tell_what_fake_tensors_do(name: str, needs_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments, options = OF_ZEROS[name]
    compared = 0
    for given in [OF_OTHER_SHAPES[name]] if name in OF_OTHER_SHAPES else INPUTS.values():
        x = given.detach().requires_grad_(needs_grad and given.is_floating_point())
        if needs_grad and name.endswith("_") and not name.endswith("__"):
            x = x.clone()
        with suppress(RuntimeError), _Noted() as noted:  # not each takes each shape
            function(x, *arguments, **options)
        call = take_apart(*noted.calls[0])
        specs = [TensorSpec.of(tensor) for tensor in call.tensors]
        func = noted.calls[0][0]
        told = Inference()._without_draws(func, call, specs)
        if told is None:
            continue
        assert inference._is_told_by_zeros(func, specs)
        with monkeypatch.context() as patch:
            patch.setattr(inference, "_is_told_by_zeros", lambda *_: False)
            assert told == Inference().result(func, call, specs)
        compared += 1
    assert compared


@pytest.mark.parametrize("needs_grad", [False, True])
def test_memory_between_elements_is_zeros(needs_grad: bool) -> None:
    """Kernels such as that of ctc_loss read it: as a class, garbage is far beyond the tensor."""
    given = torch.ones(64, 2)[:, 0].requires_grad_(needs_grad)

    def between(x: Tensor) -> list[float]:
        return x.detach().as_strided((63,), (2,), 1).tolist()

    for content in (0, given):
        garbage = [torch.full((127,), 7.0) for _ in range(8)]
        del garbage
        assert between(inference._made(TensorSpec.of(given), content)) == [0.0] * 63
