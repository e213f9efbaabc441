"""How what steps read, keep and write lies in memory: parts of tensors, transposed, with holes, repeated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.habits.modules import WIDTH, Layer, Layers, Noting
from tests.habits.table import habit

LENGTH = 37


class Sequences(Noting):
    """Classifies sequences of vectors."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(8, LENGTH, WIDTH, generator=generator)
        return x, torch.randint(0, 4, (8,), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)


def parts_of(x: Tensor) -> list[Tensor]:
    """A transposed view, others with holes, and one that repeats its elements."""
    return [
        x.transpose(1, 2),
        x.transpose(1, 2)[:, ::2],
        x[:, ::3, 1:5].permute(2, 0, 1),
        x[:, :1].expand(-1, 5, -1),
    ]


def told(tensor: Tensor) -> list[Any]:
    """Strides, and sums whose last bits may depend on them."""
    array = tensor.detach().cpu().numpy()
    return [tensor.stride(), tensor.is_contiguous(), array.strides, float(array.mean()), float(array.std())]


@habit(observed=["found"])
class PartsReadAsArrays(Sequences):
    """`.cpu().numpy()` of parts of hidden values, whose strides the arrays have."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
            self.found += map(told, parts_of(x))
        out = self.head(x.mean(1))
        self.found.append(told(F.log_softmax(out.t(), 0)))
        return F.cross_entropy(out, y)


@habit(observed=["found"], plain=False)
class PartsKept(Sequences):
    """Parts of hidden values that the next step and hooks read."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.found += map(told, self.kept)
        hidden = self.features(x)
        self.kept = parts_of(hidden.detach())
        return F.cross_entropy(self.head(hidden.mean(1)), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found += map(told, self.kept)


@habit(observed=["found"])
class PartsOfBatchOverwritten(Sequences):
    """Parts of the batch that stages add to theirs, before the step writes into the batch."""

    def mixed(self, x: Tensor, hidden: Tensor) -> Tensor:
        found = hidden.transpose(1, 2)[:, ::2] + x.transpose(1, 2)[:, ::2]
        found = found + x[:, :1].expand(-1, LENGTH, -1).transpose(1, 2)[:, 1::2]
        self.found.append(found.stride())
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[0](x.clone())
        early = self.mixed(x, self.layers[1](hidden))
        x.mul_(2)
        late = self.mixed(x, self.layers[3](self.layers[2](hidden)))
        x.numpy()[:] += 1
        both = torch.cat([early.sum(-1), late.mean(-1)], -1)
        loss = F.cross_entropy(self.head(both) + x.sum() * 1e-3, y)
        self.log("loss", loss)
        return loss


@habit(shows=False, plain=False)
class OneSequenceByHand(Layers):
    """Micro-batches of one sequence go through views that are undone, in a hand-optimized step of two parts."""

    batches_made = 0

    class Swapped(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(1, 2).transpose(1, 2))

    layer = Swapped

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def batch(self, generator: torch.Generator) -> Any:  # type: ignore[override]
        self.batches_made += 1
        x, y = super().batch(generator)
        size = 2 if self.batches_made == 3 else len(x)
        return x[:size, None].repeat(1, 3, 1), y[:size]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        for _ in range(2):
            loss = F.cross_entropy(self(x).mean(1), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
