"""Which gradients nobody looks at any more once the next batch has begun."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer


def zeroed_unseen(module: LightningModule, optimizers: Sequence[Optimizer]) -> set[nn.Parameter]:
    """Parameters whose last gradients Lightning sets to None after `training_step`, with nobody to see them before.

    None of them where a hook of the module or of a callback, or an optimizer of the user's own, could tell.
    """
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    if (
        is_overridden("optimizer_zero_grad", module)
        or is_overridden("on_before_zero_grad", module)
        or any(is_overridden("on_before_zero_grad", callback, Callback) for callback in callbacks)
        or any(type(optimizer).zero_grad is not Optimizer.zero_grad for optimizer in optimizers)
    ):
        return set()
    return {parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
