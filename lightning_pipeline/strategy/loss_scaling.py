"""fp16 loss scaling on which all ranks agree: an overflow on one of them skips the step on all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.fully_sharded import plain


def agree_on_overflow(scaler: GradScaler, device: torch.device) -> Callable[[], None]:
    """Make `scaler` skip steps and change its scale as one scaler of the whole model would.

    Returns a function that undoes it.

    A rank's scaler looks for infinities in its own gradients, and has nothing to look at where a stage is frozen. So
    what it found is replaced by the largest of all ranks; every rank unscales once a step, also where it has none.
    """
    own_gradients = scaler._unscale_grads_

    def all_gradients(optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        groups = [{"params": plain(group["params"])} for group in optimizer.param_groups]
        found = own_gradients(SimpleNamespace(param_groups=groups), *args)  # type: ignore[arg-type]
        worst = torch.zeros((), dtype=torch.float32, device=device)
        for value in found.values():
            worst = torch.maximum(worst, value.to(device))
        with waiting_for("whether gradients of another rank are infinite"):
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if hasattr(scaler, "_has_overflow"):  # where torch_npu's scaler notes it once more, to change the scale by
            scaler._has_overflow |= bool(worst)
        return {device: worst}

    vars(scaler)["_unscale_grads_"] = all_gradients
    return lambda: vars(scaler).pop("_unscale_grads_", None)
