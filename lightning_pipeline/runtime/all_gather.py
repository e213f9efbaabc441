"""Tensors of all replicas, with gradients that find their way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.runtime.failure import waiting_for


def all_gather(tensor: Tensor, group: dist.ProcessGroup, *, sync_grads: bool = False) -> Tensor:
    """Every rank's `tensor`, which has one shape on all of them, as [number of ranks, ...].

    Args:
        sync_grads: backward gives each rank the sum of what all ranks' results mean for its own tensor; else there is
            no backward.
    """
    if sync_grads:
        return _AllGather.apply(tensor, group)
    with torch.no_grad():
        return _gathered(tensor, group)


class _AllGather(torch.autograd.Function):
    """That of torch.distributed.nn takes, over Gloo, a rank's place in its group for its rank in the world."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        with waiting_for("the gradients of what all ranks gathered"):
            dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    with waiting_for("a tensor of all ranks"):
        dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)
