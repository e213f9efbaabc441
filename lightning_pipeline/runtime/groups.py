"""Makes process groups, with errors that tell which rank did not come."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_pipeline import _torch
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.store import BoundedStore


def new_group(ranks: Sequence[int] | None, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    """``dist.new_group`` for some ranks (None: all), with a bound on all waits. Every rank has to call it.

    Raises:
        StoreLostError: the host of the store, by which the ranks find each other, ended or does not answer.
        PeerFailedError: another rank failed.
        PipelineTimeoutError: another rank did not come in time.
    """
    store = BoundedStore(_torch.default_store(), rank=dist.get_rank(), limit=timeout)
    with store.asked(), waiting_for("all ranks to make a process group"):
        return dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)
