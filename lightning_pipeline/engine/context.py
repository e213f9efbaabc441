"""Context parallelism: the ranks among which the sequences of a replica of a stage are cut.

All of them see the same samples, run the same Python, and compute their parts of the sequence; what mixes positions in
another way than attention is computed on the whole sequence by each. A step on them is one function of each rank's copy
of the parameters::

    sum over ranks of the loss = number of ranks * loss

All that goes between ranks is differentiated as such: what one rank takes from all gives gradients to all. So the mean
of the ranks' gradients is that of the loss, wherever the sequence is cut and joined, as with replicas.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline.engine.ring_attention import RingAttention
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.runtime.replicas import all_gather


class ContextRanks:
    """What a stage does with sequences that it shares with the other ranks of a group.

    A sequence of ``2 * size`` pieces is cut so that each rank has one piece of the first half and that as far from the
    end: under a causal mask, all have equally much to attend to.

    Args:
        group: carries tensors on the device.
        control_group: the same ranks; carries tensors on the CPU.
    """

    def __init__(self, group: dist.ProcessGroup, control_group: dist.ProcessGroup) -> None:
        self.group, self.control_group = group, control_group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor, along a dimension of ``2 * size`` pieces."""
        pieces = tensor.chunk(2 * self.size, dim)
        return torch.cat((pieces[self.rank], pieces[-1 - self.rank]), dim)

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole of a tensor of which each rank has its part. All of them must call it."""
        parts = all_gather(tensor, self.group, sync_grads=True)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))], dim)

    def dropout(
        self, whole: TensorSpec, dim: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """``dropout`` of this rank's part of a tensor, by what is drawn for the whole, as in one process.

        Args:
            whole, dim: spec of the whole tensor, and where it is cut.
        """
        assert whole.stride is not None
        kept = torch.empty_strided(whole.shape, whole.stride, dtype=input.dtype, device=input.device).fill_(1)
        return input * self.part(F.dropout(kept, p, training), dim)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``scaled_dot_product_attention`` of the whole sequence, for the queries of this rank's part.

        Args:
            query, key, value: parts, [batch, heads, positions, head size].
            attn_mask, dropout_p: not supported; `recording.sequence_cut` refuses such calls.
        """
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        applied: Any = RingAttention.apply(query, key, value, is_causal, scale, self.group)
        return applied
