"""Mixed precision, in which the order of sums and of casts shows in the third digit."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn

from tests.habits.layers import TransformerEncoderLayers
from tests.habits.modules import Evaluated
from tests.habits.table import error, habit


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


@habit(shows=False, plain=False, calls=["fit", "test"], trainer={"precision": "bf16-mixed"})
class MixedAttention(TransformerEncoderLayers):
    """A transformer layer's fast path in evaluation, whose kernel calls what autocast casts."""


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


class UncachedPrecision(MixedPrecision):
    """Of the user's, which changes how steps compute."""

    def forward_context(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


class ClampingPrecision(Precision):
    """Of the user's, which changes gradients."""

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.main_params(optimizer):
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.02, 0.02)


@habit(shows=False, calls=["fit", "test"], trainer=lambda folder: {"plugins": [UncachedPrecision("bf16-mixed", "cpu")]})
class MixedByOwnPlugin(Mixed):
    """A plugin of a class that is derived from Lightning's."""


@habit(
    shows=False,
    plain=False,
    trainer=lambda folder: {"plugins": [ClampingPrecision()]},
    expect=error("precision plugin ClampingPrecision changes clip_gradients.*configure_gradient_clipping"),
)
class ClippedByOwnPlugin(Evaluated):
    """A plugin that clips gradients in its own way."""
