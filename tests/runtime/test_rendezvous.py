"""Attempts of a run that share a store do not meet each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_pipeline.runtime.failure import PipelineTimeoutError
from lightning_pipeline.runtime.rendezvous import fresh_store
from lightning_pipeline.runtime.store import BoundedStore
from tests.launching import PATIENCE_S

TIMEOUT = timedelta(seconds=PATIENCE_S)


def meet(store: dist.Store, ranks: list[int], world_size: int, timeout: timedelta = TIMEOUT) -> list[BoundedStore]:
    def join(rank: int) -> BoundedStore:
        own = BoundedStore(store, rank=rank, limit=TIMEOUT).clone()
        return fresh_store(own, world_size=world_size, timeout=timeout)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(join, ranks))


def test_the_ranks_of_an_attempt_find_each_other_and_nothing_older() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    for _attempt in range(3):
        stores = meet(store, [2, 1, 0], 3)
        assert not any(found.check("address") for found in stores)
        stores[0].set("address", "of rank 2")
        assert [found.get("address") for found in stores] == ["of rank 2"] * 3
        with pytest.raises(RuntimeError, match=r"rank 1 of 2 did not start within 0\.1 s"):
            meet(store, [0], 2, timedelta(seconds=0.1))  # though it said hello in the attempt before
        with pytest.raises(PipelineTimeoutError, match=r"rank 0 did not greet rank 1 of 2 within 0\.1 s"):
            meet(store, [1], 2, timedelta(seconds=0.1))
