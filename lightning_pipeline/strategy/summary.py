"""What users see of stages, replicas and the batch: a summary at the first step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_pipeline import _torch
from lightning_pipeline.runtime.topology import Topology

_SHOWN = 3
"""Names of batch norms."""


def summary_of(topology: Topology, sizes: Sequence[int] | None, accumulate: int) -> str:
    """How batches, micro-batches, stages and replicas go together.

    Args:
        sizes: samples of each micro-batch of one replica's step; None where the batch is the only one, unsplit.
    """
    replicas, whole = topology.data_parallel_size, ""
    parts = "a replica's batch is one micro-batch"
    if sizes is not None:
        batch, different = sum(sizes), " and ".join(map(str, sorted(set(sizes), reverse=True)))
        microbatches = f"{len(sizes)} micro-batch{'es' * (len(sizes) > 1)} of {different}"
        parts = f"a replica's batch of {_count(batch, 'sample')} is {microbatches}"
        whole = f"; {batch * replicas} samples a step over {replicas} replicas" if replicas > 1 else ""
    window = f"; gradients of {accumulate} batches make an update" if accumulate > 1 else ""
    return f"Pipeline: {_count(topology.num_stages, 'stage')}, {_count(replicas, 'replica')}; {parts}{whole}{window}"


def batch_norms_of(module: nn.Module, sizes: Sequence[int]) -> str | None:
    """A line on batch norms, which see micro-batches of these sizes; None where there are none, or one micro-batch."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, _torch.BatchNorm) and layer.training]
    if not names or len(sizes) == 1:
        return None
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"Batch norm ({', '.join(names[:_SHOWN])}{more}) takes the mean and variance of each micro-batch of "
        f"{sizes[0]} samples, and updates its running statistics as often: as with smaller batches and accumulated "
        f"gradients, not as with one batch of {sum(sizes)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
