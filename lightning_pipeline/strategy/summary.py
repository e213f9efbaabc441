"""What users see of the world size and the batch: a summary at the first step, and replicas in hooks that set data up.

Code that divides a batch, or scales a learning rate, by ``trainer.world_size`` means the processes that read other
samples: the replicas. The stages of one replica share its batches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

from torch import nn

from lightning_pipeline import _torch
from lightning_pipeline._names import PACKAGES
from lightning_pipeline.runtime.topology import Topology

_SHOWN = 3
"""Names of batch norms."""


def summary_of(topology: Topology, sizes: Sequence[int] | None, accumulate: int) -> str:
    """How batches, micro-batches, stages and replicas go together.

    Args:
        sizes: samples of each micro-batch of one replica's step; None where the batch is the only one, unsplit.
        accumulate: batches over which gradients are accumulated.
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


_LOADERS = tuple(f"{kind}_dataloader" for kind in ("train", "val", "test", "predict"))
_SETTING_UP = frozenset(("prepare_data", "setup", "configure_optimizers", *_LOADERS))
_OWN = (*PACKAGES, "lightning_pipeline")


def is_asked_in_run(*ways: str) -> bool:
    """Whether the user's code asks for a property of the strategy in a step or hook, or in one that sets data up.

    Args:
        ways: the Trainer's properties that lead to the strategy's, innermost first.
    """
    frame: FrameType | None = sys._getframe(2)
    for way in ways:
        if frame is None or not _is_own(frame) or frame.f_code.co_name != way:
            if len(ways) > 1:
                return False
            break  # asked of the strategy itself, and not of the Trainer
        frame = frame.f_back
    if frame is None or _is_own(frame):
        return False
    while frame is not None:
        if _is_own(frame):
            if frame.f_code.co_name == "_run":  # the Trainer's
                return True
        elif frame.f_code.co_name in _SETTING_UP:
            return True
        frame = frame.f_back
    return False


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN
