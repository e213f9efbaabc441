"""Backward in two parts is to the bit the whole backward."""

from __future__ import annotations

import copy
import random
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

from lightning_pipeline.recording.split_backward import SplitBackward

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


# -- modules ----------------------------------------------------------------------------------------------------------


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


def user_leaf(m: Any, x: Tensor) -> Tensor:
    """A leaf that is no parameter, and a parameter that is not used (`u`)."""
    if not hasattr(m, "offset"):
        m.offset = torch.zeros(8, requires_grad=True)
        m.register_buffer("scale", torch.ones(8))
    return F.linear(x + m.offset, m.w) * m.v * m.scale


def embedding(m: Any, x: Tensor) -> Tensor:
    ids = torch.arange(6) % 5
    return F.linear(x + F.embedding(ids, m.w), m.w)


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


def gradient_penalty(m: Any, x: Tensor) -> Tensor:
    """A graph of the second order."""
    y = torch.tanh(F.linear(x, m.w)) * m.v
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.linear(y, m.u).sum() + slope.square().sum()


UNUSED = (in_place, root_used, embedding, several_uses)
"""Steps that do not use all of the parameters."""


@pytest.mark.parametrize(
    "step", [several_uses, in_place, custom_function, two_roots, root_used, embedding, gradient_penalty]
)
def test_parameters_without_a_module(step: Step) -> None:
    shapes = {"w": (8, 8), "v": (8,), "u": (8, 8)}
    if step is custom_function:
        shapes["u"] = (8,)
    assert all(gradient is not None for gradient in check(Plain(**shapes), step, 6, 8).values()) or step in UNUSED
    check(Plain(**shapes), step, 6, 8, order="I0 I1 W0 I2 W1 W2")


def test_leaves_that_are_no_parameters_and_unused_and_frozen_parameters() -> None:
    module: Any = Plain(w=(8, 8), v=(8,), u=(8, 8))
    module.v.requires_grad_(False)
    other = copy.deepcopy(module)
    inputs = [sample(1, 6, 8)]
    whole(module, user_leaf, inputs)
    split(other, user_leaf, inputs)
    assert same(module.offset.grad, other.offset.grad) and module.offset.grad.any()
    assert same(gradients_of(module), gradients_of(other))
    assert module.u.grad is None and module.v.grad is None and module.w.grad is not None


def test_nothing_received_leaves_all_of_it_to_the_second_part() -> None:
    for unreachable in (False, True):
        module = nn.Linear(8, 8)
        other = copy.deepcopy(module)
        module(sample(1, 4, 8)).square().sum().backward()
        _, edges = enter(sample(2, 4, 8)) if unreachable else ([], [])
        parts = SplitBackward([other(sample(1, 4, 8)).square().sum()], [None], edges)
        assert parts.input_gradients() == ((None,) if unreachable else ())
        assert other.weight.grad is None
        parts.weight_gradients()
        assert same(gradients_of(module), gradients_of(other))


def test_several_inputs_of_which_one_is_not_reached() -> None:
    layer = nn.Linear(8, 8)
    tensors = [sample(n, 4, 8) for n in range(3)]
    (a, b, _), edges = enter(*tensors)
    parts = SplitBackward([(layer(a) * b).sum()], [None], edges)
    found = parts.input_gradients()
    a, b, _ = (tensor.requires_grad_() for tensor in tensors)
    (layer(a) * b).sum().backward()
    assert same(list(found), [a.grad, b.grad, None])


def test_a_gradient_is_only_left_out_for_a_scalar() -> None:
    with pytest.raises(ValueError, match=r"a tensor of shape \(4, 8\) and got None"):
        SplitBackward([nn.Linear(8, 8)(sample(1, 4, 8))], [None], [])


def test_micro_batches_may_be_interleaved() -> None:
    torch.manual_seed(0)
    check(nn.Sequential(Block(), Block()), run, 2, 6, 16, order="I0 I1 W0 I2 W1 W2")
    check(nn.Sequential(Block(), Block()), run, 2, 6, 16, order="I0 I1 I2 W0 W1 W2")


def test_a_function_of_the_users_runs_once() -> None:
    Twice.calls = 0
    split(Plain(w=(8, 8), v=(8,), u=(8,)), custom_function, [sample(1, 6, 8)])
    assert Twice.calls == 2  # it is used twice


def test_each_part_computes_its_gradients_alone() -> None:
    """No product of matrices is computed twice, and those for weights are left to the second part."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    (x,), edges = enter(sample(1, 4, 8))
    parts = SplitBackward([module(x).sum()], [None], edges)
    assert (count_products(parts.input_gradients), count_products(parts.weight_gradients)) == (3, 3)


def count_products(part: Callable[[], Any]) -> int:
    with torch.profiler.profile() as profile:
        part()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")


def test_hooks_are_called_once_and_count() -> None:
    """On a leaf, a leaf used twice, a value between, and a module; of each kind."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))
            self.calls: list[str] = []
            for name, leaf in self.named_parameters():
                leaf.register_hook(lambda g, name=name: self.calls.append(name) or g * 2)
                leaf.register_post_accumulate_grad_hook(lambda _, name=name: self.calls.append("after " + name))
            self.one.register_full_backward_hook(lambda *_: self.calls.append("module"))

        def forward(self, x: Tensor) -> Tensor:
            h = self.two(torch.tanh(self.two(self.one(x) * self.scale))) * self.scale
            h.register_hook(lambda g: self.calls.append("value") or g * 3)
            wide = F.linear(h, self.two.weight * 2)
            wide.register_hook(lambda g: self.calls.append("wide") or g * 3)
            return wide

    torch.manual_seed(0)
    module = Hooked()
    whole(module, run, [sample(1, 4, 8)])
    before, module.calls = module.calls, []
    expected = gradients_of(module)
    module.zero_grad()
    split(module, run, [sample(1, 4, 8)])
    assert sorted(module.calls) == sorted(before) and len(before) == 13
    assert same(gradients_of(module), expected)


def test_the_graph_goes_with_the_second_part_and_most_of_its_memory_with_the_first() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    (x,), edges = enter(sample(1, 4, 8))
    hidden = module[0](x)
    for_gelu, for_linear = weakref.ref(hidden), module[1](hidden)
    loss = module[2](for_linear).sum()
    for_linear, entry = weakref.ref(for_linear), weakref.ref(edges[0].node)
    parts = SplitBackward([loss], [None], edges)
    del x, edges, hidden, loss
    assert for_gelu() is not None and for_linear() is not None
    parts.input_gradients()
    assert for_gelu() is None, "only the first part needs it"
    assert for_linear() is not None and entry() is not None
    parts.weight_gradients()
    assert for_linear() is None and entry() is None


def test_memory_of_the_first_part_goes_on_its_way() -> None:
    """When backward comes to the first layer, what only the second needed is gone."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    (x,), edges = enter(sample(1, 4, 8))
    y = first(x)
    alive: list[bool] = []
    y.register_hook(lambda _: alive.append(for_gelu() is not None))
    y = second(torch.tanh(y))
    for_gelu = weakref.ref(y)
    loss = F.gelu(y).sum()
    del y
    parts = SplitBackward([loss], [None], edges)
    assert for_gelu() is not None
    parts.input_gradients()
    assert alive == [False]


def test_under_anomaly_detection() -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        check(nn.Sequential(Block(0.0)), run, 2, 6, 16)


def test_with_hooks_on_saved_tensors() -> None:
    def step(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t), torch.autograd.graph.save_on_cpu():
            return module(x)

    torch.manual_seed(0)
    check(nn.Sequential(Block()), step, 2, 6, 16)


def test_reentrant_checkpointing_runs_whole() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(16, 16), Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=True)

    for leaf in (True, False):
        torch.manual_seed(0)
        module = Checkpointed()
        other = copy.deepcopy(module)
        expected = whole(module, run, [sample(1, 2, 6, 16)])
        torch.manual_seed(0)
        (x,), edges = enter(sample(1, 2, 6, 16), leaf=leaf)
        parts = SplitBackward(*as_roots(other(x)), edges)
        assert same([list(parts.input_gradients())], expected)
        parts.weight_gradients()
        assert same(gradients_of(other), gradients_of(module)) and (not leaf or x.grad is None)


@pytest.mark.parametrize("donated", [False, True])
def test_compiled_functions(donated: bool) -> None:
    with torch._functorch.config.patch(donated_buffer=donated):
        compare_compiled()


def compare_compiled() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    compiled = torch.compile(copy.deepcopy(module[1:]), backend="aot_eager")
    expected = whole(module, run, [sample(1, 4, 8)])
    other = nn.Sequential(copy.deepcopy(module[0]), compiled)
    other.zero_grad()
    (x,), edges = enter(sample(1, 4, 8))
    parts = SplitBackward(*as_roots(other(x)), edges)
    torch.testing.assert_close(list(parts.input_gradients()), expected[0])
    parts.weight_gradients()
    torch.testing.assert_close([p.grad for p in other.parameters()], [p.grad for p in module.parameters()])


@pytest.mark.parametrize("true", [False, True], ids=["autocast", "true bf16"])
def test_bf16(true: bool) -> None:
    """Under autocast a weight that is used twice is cast once."""
    torch.manual_seed(0)
    block = Block(0.0)

    def step(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not true):
            x = x.bfloat16() if true else x
            return module(x).float()

    module = nn.Sequential(block, block)
    check(module.bfloat16() if true else module, step, 2, 6, 16)


# -- Hugging Face's models: the embeddings are what was received -----------------------------------------------------

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def hugging_face(name: str) -> nn.Module:
    t = transformers
    configs: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=1)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**SMALL)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
        ),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4, output_router_logits=True)
        ),
        "albert": lambda: t.AlbertForMaskedLM(t.AlbertConfig(**SMALL, embedding_size=16)),
    }
    return configs[name]()


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(inputs_embeds=x, labels=torch.arange(12).view(2, 6)).loss


@pytest.mark.parametrize(
    "name", ["gpt2", "t5", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "bert", "mixtral", "albert"))]
)
def test_hugging_face(name: str) -> None:
    torch.manual_seed(0)
    check(hugging_face(name).train(), loss_of, 2, 6, 16, order="I0 I1 W0 I2 W1 W2")


# -- random graphs -----------------------------------------------------------------------------------------------------


class Pair(torch.autograd.Function):
    """Two results of two tensors."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b)
        ctx.factor = factor
        return a * b * factor, a + b

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return first * b * ctx.factor + second, first * a * ctx.factor + second, None


def random_roots(seed: int, given: list[Tensor]) -> list[Tensor]:
    """Some of the values that random operations make of 4x4 tensors."""
    choose = random.Random(seed)
    values = list(given)
    operations: list[Callable[[Tensor, Tensor], Tensor]] = [
        torch.add,
        torch.mul,
        lambda a, _: torch.tanh(a),
        lambda a, b: a @ b.t(),
        lambda a, b: torch.addmm(a, b, torch.tanh(a)),
        lambda a, b: values.append(Pair.apply(a, b, 0.5)[1]) or Pair.apply(b, a, 0.5)[0],
        lambda a, b: (a * 1).index_add_(0, torch.tensor([2]), b[:1]),
        lambda a, b: F.layer_norm(a, (4,), b[0], b[1]),
        lambda a, _: torch.cat([half * 0.5 for half in (a * 2).chunk(2)]),
    ]
    for _ in range(choose.randint(5, 30)):
        recent = values[-8:] if choose.random() < 0.6 else values
        values.append(torch.tanh(choose.choice(operations)(choose.choice(recent), choose.choice(values))))
    made = values[len(given) :]
    return choose.sample(made, choose.randint(1, 4))


def test_random_graphs() -> None:
    for seed in range(250):
        found = []
        for in_parts in (False, True):
            inputs = [sample(n, 4, 4).requires_grad_() for n in range(2)]
            leaves = [sample(n + 2, 4, 4).requires_grad_() for n in range(4)]
            edges = [get_gradient_edge(x) for x in inputs]
            roots, gradients = as_roots(random_roots(seed, inputs + leaves))
            if in_parts:
                parts = SplitBackward(roots, gradients, edges)
                of_inputs = list(parts.input_gradients())
                assert all(tensor.grad is None for tensor in inputs + leaves)
                parts.weight_gradients()
            else:
                torch.autograd.backward(roots, gradients)
                of_inputs = [x.grad for x in inputs]
            found.append(of_inputs + [leaf.grad for leaf in leaves])
        assert same(*found), seed
