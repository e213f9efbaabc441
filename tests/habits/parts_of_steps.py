"""Hand-optimized steps whose parts use what earlier ones have made, and go back through it in several backwards."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from tests.habits.modules import Layers
from tests.habits.table import habit


class ByHand(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@habit(plain=False)
class ParametersInTwoGraphs(ByHand):
    """Two losses come from graphs of their own, both made after a step, in which the same layers take part."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        early = self.layers[0](x)
        optimizer.step()
        later = self.layers[3](self.layers[0](early))
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        self.manual_backward(later.square().mean())
        self.log("train_loss", loss)

    def on_train_batch_end(self, *_: Any) -> None:
        self.optimizers().step()
        self.optimizers().zero_grad()
