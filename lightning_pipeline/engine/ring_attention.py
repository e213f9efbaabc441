"""Attention of a sequence of which each rank has a part: keys and values go round in a ring, queries stay.

Each rank attends to one part's keys and values at a time. What it has so far is scaled by its share of the softmax's
denominator, whose logarithm the kernels return (Liu et al. 2023, "Ring Attention with Blockwise Transformers"). The
parts are cut as in `context.ContextRanks.part`, so that under a causal mask all ranks have equally much to do::

    first half of the part  = piece `rank` of the sequence        two ranks: 0 | . . |
    second half             = the piece as far from its end                  | 1 1 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_pipeline import _torch
from lightning_pipeline.runtime.failure import waiting_for


class RingAttention(torch.autograd.Function):
    """``scaled_dot_product_attention`` of [batch, heads, positions of a part, head size], over the ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, group: dist.ProcessGroup
    ) -> Tensor:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        here = [key.contiguous(), value.contiguous()]
        total = log_sum = torch.empty(0)
        for step in range(size):
            exchange = Exchange(here, group) if step + 1 < size else None
            rows, columns, is_masked = _block(rank, (rank - step) % size, query.shape[2], is_causal)
            found, log = _attend(query[:, :, rows], here[0][:, :, columns], here[1][:, :, columns], is_masked, scale)
            if step == 0:  # its own part, so all rows
                total, log_sum = found.to(torch.promote_types(query.dtype, torch.float32)), log
            else:
                before = log_sum[:, :, rows]
                both = torch.logaddexp(before, log)
                total[:, :, rows].mul_((before - both).exp()[..., None]).add_(found * (log - both).exp()[..., None])
                log_sum[:, :, rows] = both
            if exchange is not None:
                here = exchange.wait()
        result = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_sum)
        ctx.given = is_causal, scale, group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, log_sum = ctx.saved_tensors
        is_causal, scale, group = ctx.given
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        dtype = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros_like(query, dtype=dtype)
        here = [key.contiguous(), value.contiguous()]
        # The gradients of a part's keys and values go round with them, and come home after the last step.
        sums = [torch.zeros_like(one, dtype=dtype) for one in here]
        for step in range(size):
            rows, columns, is_masked = _block(rank, (rank - step) % size, query.shape[2], is_causal)
            of_rows = [one[:, :, rows] for one in (gradient, query, result, log_sum)]
            of_columns = [one[:, :, columns] for one in here]
            found = _attend_back(of_rows, of_columns, is_masked, scale)
            of_query[:, :, rows] += found[0]
            for total, part in zip(sums, found[1:], strict=True):
                total[:, :, columns] += part
            if step + 1 < size:
                *here, sums[0], sums[1] = Exchange([*here, *sums], group).wait()
        sums = Exchange(sums, group).wait()
        return (of_query.to(query.dtype), sums[0].to(key.dtype), sums[1].to(value.dtype), None, None, None)


class Exchange:
    """Tensors on their way to the next rank of a ring, while those of the rank before come."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._sent = tensors  # which must not be freed on their way
        self._coming = [torch.empty_like(tensor) for tensor in tensors]
        transfers = [dist.P2POp(dist.isend, one, group=group, group_peer=(rank + 1) % size) for one in tensors]
        transfers += [dist.P2POp(dist.irecv, one, group=group, group_peer=(rank - 1) % size) for one in self._coming]
        self._works = dist.batch_isend_irecv(transfers)

    def wait(self) -> list[Tensor]:
        """What has come from the rank before."""
        with waiting_for("another part of the sequence"):
            for work in self._works:
                work.wait()
        return self._coming


def _block(rank: int, source: int, length: int, is_causal: bool) -> tuple[slice, slice, bool]:
    """The rows of this rank's part, and the columns of another rank's, of which some see the others.

    Args:
        length: of a part.

    Returns:
        Them, and whether the causal mask lies between them: else each of the rows sees each of the columns.
    """
    everything = slice(None)
    if not is_causal or source == rank:
        return everything, everything, is_causal
    # Of a rank before, the first half comes before all of this part, and the second half after all of it.
    return (everything, slice(length // 2), False) if source < rank else (slice(length // 2, None), everything, False)


def _attend(query: Tensor, key: Tensor, value: Tensor, is_masked: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The attention of some rows to some columns, and the logarithm of each row's sum of exponentials."""
    if _has_kernel(query, value):
        return _torch.cpu_attention(query, key, value, 0.0, is_masked, scale=scale)
    scores = _scores(query, key, is_masked, scale)
    log = scores.logsumexp(-1)
    return (scores - log[..., None]).exp().to(value.dtype) @ value, log


def _attend_back(
    of_rows: Sequence[Tensor], of_columns: Sequence[Tensor], is_masked: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of some rows' queries, and of some columns' keys and values.

    Args:
        of_rows: the gradient of their result, queries, result and logarithms; these two are of all columns.
        of_columns: keys and values.
    """
    gradient, query, result, log_sum = of_rows
    key, value = of_columns
    if _has_kernel(query, value):
        log_sum = log_sum.contiguous()
        return _torch.cpu_attention_backward(gradient, query, key, value, result, log_sum, 0.0, is_masked, scale=scale)
    gradient, result, value = (one.to(log_sum.dtype) for one in (gradient, result, value))
    shares = (_scores(query, key, is_masked, scale) - log_sum[..., None]).exp()
    of_shares = gradient @ value.transpose(-1, -2) - (gradient * result).sum(-1, keepdim=True)
    of_scores = shares * of_shares * scale
    of_key = of_scores.transpose(-1, -2) @ query.to(log_sum.dtype)
    return of_scores @ key.to(log_sum.dtype), of_key, shares.transpose(-1, -2) @ gradient


def _scores(query: Tensor, key: Tensor, is_masked: bool, scale: float) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) @ key.to(dtype).transpose(-1, -2)) * scale
    if is_masked:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether torch has a kernel that gives the logarithms, and needs no memory for the scores."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
