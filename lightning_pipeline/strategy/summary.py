"""What a training step is made of, told when the first one has run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.topology import Topology

_SHOWN = 3
"""Names of batch norms."""


def summary_of(topology: Topology, states: Sequence[Microbatch], accumulate: int) -> str:
    """How batches, micro-batches, stages and replicas go together.

    Args:
        states: the micro-batches of a step of one replica.
        accumulate: batches over which gradients are accumulated.
    """
    replicas, sizes = topology.data_parallel_size, sorted({state.num_samples for state in states}, reverse=True)
    batch = sum(state.num_samples for state in states)
    parts = f"{len(states)} micro-batch{'es' * (len(states) > 1)} of {' and '.join(map(str, sizes))}"
    whole = f"; {batch * replicas} samples a step over {replicas} replicas" if replicas > 1 else ""
    window = f"; gradients of {accumulate} batches make an update" if accumulate > 1 else ""
    return (
        f"Pipeline: {_count(topology.num_stages, 'stage')}, {_count(replicas, 'replica')}; "
        f"a replica's batch of {_count(batch, 'sample')} is {parts}{whole}{window}"
    )


def batch_norms_of(module: nn.Module, states: Sequence[Microbatch]) -> str | None:
    """A line on batch norms, which see micro-batches; None where there are none, or one micro-batch."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm) and layer.training]
    if not names or len(states) == 1:
        return None
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"Batch norm ({', '.join(names[:_SHOWN])}{more}) takes the mean and variance of each micro-batch of "
        f"{states[0].num_samples} samples, and updates its running statistics as often: as with smaller batches and "
        f"accumulated gradients, not as with one batch of {sum(state.num_samples for state in states)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
