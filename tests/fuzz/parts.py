"""What random programs are built from: blocks of width 8, and a module around them whose methods they fill."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.habits.modules import CLASSES, WIDTH, Layers

SAMPLES = 16


@dataclass
class Out:
    x: Tensor
    aux: Tensor


class Block(nn.Module):
    """A layer that can be called in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self(x), self.linear(x).square().mean()

    def as_dict(self, x: Tensor) -> dict[str, Any]:
        return {"x": self(x), "more": [x * 0.5, self.linear.bias]}

    def as_data(self, x: Tensor) -> Out:
        return Out(self(x), x.detach().mean())


class Plain(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class BatchNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.linear(x)))


class Convolved(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x.view(-1, 2, 4)).relu().flatten(1))


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found, last = self.gru(x.reshape(-1, 2, 4))
        return found.reshape(-1, 8) + self.linear(x) * last.mean()


class Attending(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.reshape(-1, 2, 4)
        found, weights = self.attention(parts, parts, parts)
        return self.linear(found.reshape(-1, 8)) + weights.mean()


class Embedded(Block):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.words(x.argmax(1))


class Dropped(Block):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.2), self.linear, nn.Dropout(0.1, inplace=True), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Counting(Block):
    """Its state is a number, a list and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return torch.tanh(self.linear(x - self.mean)) * (1 + 0.01 * self.calls)


class Remembering(Block):
    """It adds what it made the time before."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.linear(x))
        before, self.last = self.last, x.detach()
        return x if before is None else x + 0.1 * before.mean(0)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x[:, 1:3].mul_(0.5)
        x += 0.1
        return x


class Routed(Block):
    """Experts, and a loss for their balance on an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(1)
        weight, chosen = scores.topk(1, dim=1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows, _ = torch.where(chosen == n)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * weight[rows])
        self.aux = 0.01 * scores.mean(0).square().sum()
        return self.linear(x) + out


class Lazy(Block):
    """It makes a mask the first time."""

    mask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDTH, WIDTH, dtype=x.dtype).tril()
        return F.linear(x, self.linear.weight * self.mask, self.linear.bias)


class LayerDropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.3:
            return x
        return super().forward(x)


class Several(Block):
    """Further arguments, and a result of parts within."""

    def parts(self, x: Tensor, *, scale: float = 1.0, extra: Any = ()) -> Any:
        return {"out": self.linear(x) * scale, "extra": [*extra, x.mean(), None, "name"]}

    def forward(self, x: Tensor) -> Tensor:
        found = self.parts(x, scale=0.5, extra=[x.sum(1)])
        return found["out"] + found["extra"][0][:, None] * 0.1 + found["extra"][1]


class ByName(Block):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(())), "b": nn.Parameter(torch.ones(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        name = "a" if len(x) % 2 == 0 and x.detach().mean() < 0 else "b"
        return self.linear(self.ways[name](x).relu() * self.scales[name])


class Recomputing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, 0.5, use_reentrant=False)

    def inner(self, x: Tensor, scale: float) -> Tensor:
        return F.dropout(torch.tanh(self.linear(x)) * scale, 0.1, self.training)


class Rounding(Block):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        scale = weight.detach().abs().max() / 7
        weight = weight + ((weight / scale).round() * scale - weight).detach()
        return F.linear(x, weight, self.linear.bias)


class Nested(Block):
    """A layer within is used twice, and one of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()
        self.other = BatchNormed()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.inner(x) + self.inner(x * 0.5)) + self.other(x)


class Hooking(Block):
    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        handle = self.linear.register_forward_hook(lambda module, args, out: found.append(out))
        self.linear(x)
        handle.remove()
        return x + torch.sigmoid(found[0])


class Switching(Block):
    """It alternates, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_other = False

    def forward(self, x: Tensor) -> Tensor:
        self.is_other = not self.is_other
        return F.silu(self.other(x) if self.is_other else self.linear(x))


class Tracking(Block):
    """A codebook that follows its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.arange(24.0).view(3, WIDTH).sin())

    def forward(self, x: Tensor) -> Tensor:
        index = torch.cdist(x.detach(), self.codes).argmin(1)
        chosen = self.codes[index]
        self.aux = 0.1 * F.mse_loss(x, chosen)
        if self.training:
            with torch.no_grad():
                counts = torch.bincount(index, minlength=3).clamp(min=1)[:, None]
                sums = torch.zeros_like(self.codes).index_add_(0, index, x.detach())
                self.codes.mul_(0.9).add_(0.1 * sums / counts)
        return self.linear(x + (chosen - x).detach() * 0.1)


class Noisy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.from_numpy(self.noise.standard_normal(WIDTH, dtype=np.float32))
        return self.linear(x) * torch.empty_like(x).uniform_(0.9, 1.1)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor + 0.01 * x, None


class Base(Layers):
    """Where a program's statements find what they use."""

    kinds: tuple[str, ...] = ()

    def __init__(self) -> None:
        super(Layers, self).__init__()
        self.blocks = nn.ModuleList([globals()[kind]() for kind in self.kinds])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.words = nn.Embedding(20, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.n, self.values, self.seen, self.norms, self.queue, self.table = 0, [], [], [], [], {}
        self.kept: Any = None
        self.generator = torch.Generator().manual_seed(3)
        self.set_up()

    def set_up(self) -> None:
        pass

    def chain(self) -> list[str]:
        return [f"blocks.{i}" for i in range(len(self.blocks))]

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {
            "x": torch.randn(SAMPLES, WIDTH, generator=generator),
            "tokens": torch.randint(0, 20, (SAMPLES, 5), generator=generator),
            "y": torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        }

    def ema(self, i: int) -> None:
        if not hasattr(self, "teacher"):
            return
        with torch.no_grad():
            for target, source in zip(self.teacher.parameters(), self.blocks[i].parameters(), strict=False):
                target.lerp_(source, 0.1) if target.shape == source.shape else None

    def teach(self, i: int) -> None:
        self.teacher = copy.deepcopy(self.blocks[i]).requires_grad_(False)
