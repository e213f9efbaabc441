"""Mixed precision, in which the order of sums and of casts shows in the third digit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.modules import Evaluated
from tests.habits.table import habit


class Mixed(Evaluated):
    """A recurrent layer and one that is called three times: weights that are cast several times in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 4, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        found, last = self.recurrent(x.reshape(-1, 2, 4))
        x = super().features(found.flatten(1) + last.mean())
        return self.layers[3](self.layers[3](x))


@habit(shows=False, calls=["fit", "test"], trainer={"precision": "bf16-mixed"})
class MixedByThePlugin(Mixed):
    """Lightning's plugin, under which each call casts its weights."""


@habit(shows=False, calls=["fit", "test"])
class MixedByHand(Mixed):
    """Autocast in the step, which keeps the weights that it has cast."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(batch, batch_idx)


@habit(shows=False)
class MixedByHandWithoutKeeping(Mixed):
    """Autocast in the step, which casts weights for each call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return super().training_step(batch, batch_idx)
