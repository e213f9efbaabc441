"""Process groups created with a timeout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.store import BoundedStore


def new_group(ranks: Sequence[int] | None, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    """As ``dist.new_group``: these ranks (None: all), with errors that say who did not come. All ranks call it.

    Raises:
        StoreLostError: the host of the store, by which the ranks find each other, ended or does not answer.
        PeerFailedError: another rank failed.
        PipelineTimeoutError: one did not come in time.
    """
    store = BoundedStore(dist.distributed_c10d._get_default_store(), rank=dist.get_rank(), limit=timeout)
    with store.asked(), waiting_for("all ranks to make a process group"):
        return dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)
