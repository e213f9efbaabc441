"""Which modules count as only computing, and what is noticed before a call of one is answered without its Python."""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mha

from lightning_pipeline.partition.placeholder import become_absent
from lightning_pipeline.recording.pure_modules import state_of

SCALE = 2.0
SEEN: list[Tensor] = []
OPTIONS = {"scale": 2.0}
DIGITS = [1]


def doubled(x: Tensor) -> Tensor:
    return x * SCALE


def remembered(x: Tensor) -> Tensor:
    SEEN.append(x)
    return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.causal = 2, True
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def split(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        return x.view(b, t, self.heads, d // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [self.split(part) for part in self.qkv(x).chunk(3, dim=-1)]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal) / math.sqrt(q.size(-1))
        return self.out(y.transpose(1, 2).reshape(*x.shape))


class Block(nn.Module):
    """In the manner of users' blocks."""

    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(4), Attention()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.skip: nn.Module | None = None
        self.gain = nn.Parameter(torch.ones(4))
        self.act, self.rate = F.gelu, 0.5
        self.encoder = nn.TransformerEncoderLayer(4, 2)
        self.register_buffer("shift", torch.zeros(4))
        self.unused = {"what no forward reads": []}

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Like this."""
        kept = x if self.skip is None else self.skip(x)
        x = kept + self.attention(self.norm(x)) * scale
        for index, layer in enumerate(self.layers):
            x = self.act(layer(x))
            if self.training and index > 0:
                x = F.dropout(x, self.rate)
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ValueError(f"{x.dim()} dimensions")
        return doubled(self.encoder(x)) * self.gain + self.shift


class NamedAlike(nn.Module):
    """A number in one module has the name of a module in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.rate = Attention(), nn.Dropout(0.5)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.rate(self.block(self.attention(x)))


class Positions(nn.Module):
    """Makes positions and a mask of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        return self.table(torch.arange(x.shape[1], device=x.device)) + torch.softmax(mask, dim=-1) @ x


class GivesModules(nn.Module):
    """To a method of its own, and tensors have methods of the names of modules'."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.ReLU()})

    def run(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x.float())

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = self.run(part, x)
        return x


PURE = [
    Block,
    NamedAlike,
    GivesModules,
    Positions,
    partial(nn.TransformerDecoderLayer, 4, 2),
    partial(nn.BatchNorm1d, 4),
]


@pytest.mark.parametrize("make", PURE, ids=lambda make: getattr(make, "func", make).__name__)
def test_what_only_computes_is_proven(make: Callable[[], nn.Module]) -> None:
    assert state_of(make()) is not None
    assert state_of(nn.Sequential(nn.Linear(4, 4), make())) is not None


def test_a_block_that_another_rank_holds_only_computes() -> None:
    block = Block()
    for parameter in block.parameters():
        become_absent(parameter, "a parameter of another rank")
    state = state_of(block)
    assert state is not None and state.is_unchanged()
    block.norm.requires_grad_(False)
    assert not state.is_unchanged()


def _body(function: Callable[..., Tensor]) -> type[nn.Module]:
    return type(function.__name__, (nn.Module,), {"forward": function})


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


class ReadsList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0]


class ReadsConfig(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(scale=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.config.scale


class ReadsTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class OwnActivation(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(4, 2, activation=remembered)


class RebindsSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.rates = [0.5]  # type: ignore[assignment]
        self.rates = (0.5,)

    def forward(self, x: Tensor) -> Tensor:
        self = self.inner  # type: ignore[assignment]
        return x * self.rates[0]


class ReadsProperty(nn.Module):
    @property
    def scale(self) -> float:
        return random.random()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class ReadsGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * OPTIONS["scale"]


class DrawsInPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class CallsWhatRemembers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return remembered(x)


class CallsOnModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.requires_grad_(False)
        return self.layer(x)


class PassesModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        layer.train()
        return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer, x)


class AliasedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for one in [self.layer]:
            one.train()
        return x


class NotesOnTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.seen = True  # type: ignore[attr-defined]
        return x


class AsksTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.scale  # type: ignore[attr-defined]


class AsksForGraph(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_leaf else x * 2


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("here")
        return x


class WithoutGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2


class Tries(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return x.view(-1)
        except RuntimeError:
            return x


class OwnCall(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class OwnAttributes(nn.Module):
    def __getattr__(self, name: str) -> object:
        SEEN.append(torch.zeros(()))
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Inherits(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale)


class UsesSeed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(x)


class Closes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda y: y * 2)(x)


class IsOneOf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if isinstance(x, types.SimpleNamespace) else 3)


class GlobalByAnotherName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        seen = SEEN
        seen.append(x)
        return x


class PrivateMethod(nn.Module):
    def __note(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.__note(x)


class Halves(nn.Module):
    def half(self, x: Tensor | None = None) -> Halves:
        SEEN.append(torch.zeros(()))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class MethodsOfValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": Halves()})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            part.half()
        return x


class Drawn:
    def __set__(self, owner: nn.Module, value: float) -> None:
        vars(owner)["scale"] = value

    def __get__(self, owner: nn.Module, cls: type) -> float:
        return random.random()


class ReadsDescriptor(nn.Module):
    scale = Drawn()

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class HiddenParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        vars(self)["weight"] = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScopesOfComprehensions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = [SEEN * 2 for SEEN in (x, x)]
        [SEEN.append(one) for one in kept]  # type: ignore[func-returns-value]
        return x


class FormatsByAList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(f"{1.25:.{DIGITS[0]}f}")


class GoesThroughItself(nn.Module):
    def __iter__(self) -> object:
        SEEN.append(torch.zeros(()))
        return iter(())

    def forward(self, x: Tensor) -> Tensor:
        return x * len(list(self))


class AsksWhetherTheSame(nn.Module):
    mode = "a b"

    def forward(self, x: Tensor, mode: str = "a b") -> Tensor:
        return x if mode is self.mode else x * 2


class DefaultDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.finfo().eps


class Noting(nn.Parameter):
    def mul(self, other: Tensor) -> Tensor:
        SEEN.append(other)
        return super().mul(other)


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Noting(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.mul(x)


class NoSuchAttribute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.nowhere


def _of_closure() -> type[nn.Module]:
    seen: list[Tensor] = []

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        seen.append(x)
        return x

    return _body(forward)


def _without_source() -> type[nn.Module]:
    names: dict[str, Callable[..., Tensor]] = {}
    exec("def forward(self, x):\n    return x * 2", names)
    return _body(names["forward"])


IMPURE = [
    *(Counts, Keeps, Fills, ReadsList, ReadsConfig, ReadsTensor, ReadsProperty, ReadsGlobal, OwnActivation),
    *(DrawsInPython, CallsWhatRemembers, CallsOnModule, PassesModule, AliasedModule, NotesOnTensor, AsksTensor),
    *(AsksForGraph, Prints, WithoutGradients, Tries, OwnCall, OwnAttributes, Inherits, UsesSeed, Closes, IsOneOf),
    *(GlobalByAnotherName, PrivateMethod, MethodsOfValues, ReadsDescriptor, HiddenParameter, ScopesOfComprehensions),
    *(GoesThroughItself, AsksWhetherTheSame, DefaultDtype, OwnParameter, NoSuchAttribute, RebindsSelf, FormatsByAList),
    *(_of_closure(), _without_source()),
]


@pytest.mark.parametrize("cls", IMPURE, ids=lambda cls: cls.__name__)
def test_what_may_do_more_than_compute_is_refused(cls: type[nn.Module]) -> None:
    assert state_of(cls()) is None
    assert state_of(nn.Sequential(nn.Linear(4, 4), cls())) is None


def test_source_that_is_not_what_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    assert state_of(Own()) is not None
    other = compile("def forward(self, x):\n    return x * 3", __file__, "exec").co_consts[0]
    code = other.replace(co_firstlineno=Own.forward.__code__.co_firstlineno)
    monkeypatch.setattr(Own.forward, "__code__", code)
    assert state_of(Own()) is None


def _set(name: str, value: object) -> Callable[[Block, pytest.MonkeyPatch], object]:
    return lambda block, patch: setattr(block, name, value)


CHANGES: dict[str, Callable[[Block, pytest.MonkeyPatch], object]] = {
    "a number": _set("rate", 0.25),
    "of equal value and another type": lambda block, patch: setattr(block.attention, "heads", 2.0),
    "the mode": lambda block, patch: block.eval(),
    "a function": _set("act", F.relu),
    "a child": _set("norm", nn.LayerNorm(4)),
    "a child that was None": _set("skip", nn.Linear(4, 4)),
    "a grandchild": lambda block, patch: setattr(block.attention, "out", nn.Linear(4, 4)),
    "one more layer": lambda block, patch: block.layers.append(nn.Linear(4, 4)),
    "a parameter": _set("gain", nn.Parameter(torch.ones(4))),
    "frozen": lambda block, patch: block.norm.requires_grad_(False),
    "its dtype": lambda block, patch: block.norm.half(),
    "a hook": lambda block, patch: block.attention.register_forward_hook(lambda *_: None),
    "a buffer": lambda block, patch: setattr(block, "shift", torch.zeros(4)),
    "a buffer's dtype": lambda block, patch: block.shift.__setattr__("data", block.shift.half()),
    "an activation": lambda block, patch: setattr(block.encoder, "activation", F.gelu),
    "whether attention may be fast": lambda block, patch: patch.setattr(mha, "_is_fastpath_enabled", False),
    "a buffer's place": lambda block, patch: block.register_buffer("mask", torch.ones(1)) or setattr(block, "n", 1),
    "a forward of its own": lambda block, patch: setattr(block.attention, "forward", lambda x: x),
    "an attribute that hides the class's": _set("width", 4),
    "the class's number": lambda block, patch: patch.setattr(Block, "width", 5),
    "a method": lambda block, patch: patch.setattr(Attention, "split", lambda self, x: x),
    "the class's forward": lambda block, patch: patch.setattr(Attention, "forward", lambda self, x: x),
    "calls of its class": lambda block, patch: patch.setattr(Block, "__call__", lambda self, x: x, raising=False),
    "another class": lambda block, patch: setattr(block.attention, "__class__", Block),
    "code": lambda block, patch: patch.setattr(Attention.split, "__code__", (lambda self, x: x).__code__),
    "defaults": lambda block, patch: patch.setattr(Block.forward, "__defaults__", (3.0,)),
    "a global": lambda block, patch: patch.setitem(globals(), "SCALE", 3.0),
    "a global function": lambda block, patch: patch.setitem(globals(), "doubled", remembered),
    "a function of torch": lambda block, patch: patch.setattr(F, "dropout", F.alpha_dropout),
    "a builtin that is hidden": lambda block, patch: patch.setitem(globals(), "enumerate", reversed),
    "a function of torch that a layer calls": lambda block, patch: patch.setattr(F, "layer_norm", F.rms_norm),
    "a layer's forward": lambda block, patch: patch.setattr(nn.Linear, "forward", lambda self, x: x),
    "the order of children": lambda block, patch: block.layers._modules.update({"0": block.layers._modules.pop("0")}),
    "a dictionary of hooks": lambda block, patch: vars(block.norm).update(_forward_hooks={0: print}),
    "a parameter's name on the class": lambda block, patch: patch.setattr(Block, "gain", 2.0, raising=False),
    "one for another": lambda block, patch: (delattr(block, "rate"), setattr(block, "other", 0.5)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(
    change: Callable[[Block, pytest.MonkeyPatch], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = Block()
    state = state_of(block)
    assert state is not None and state.is_unchanged()
    change(block, monkeypatch)
    assert not state.is_unchanged()


def test_what_is_not_read_may_change() -> None:
    block = Block()
    state = state_of(block)
    assert state is not None
    block.unused["what no forward reads"].append(1)
    assert state.is_unchanged()
