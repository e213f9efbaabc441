"""A store that no earlier attempt of the same run has written to."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from lightning_pipeline.runtime.errors import PipelineTimeoutError, ranks
from lightning_pipeline.runtime.store import BoundedStore

POLL_S = 0.02


def fresh_store(store: BoundedStore, *, world_size: int, timeout: timedelta) -> BoundedStore:
    """`store` under a prefix that all ranks of this attempt come to know, and none of an earlier one knew.

    torchrun keeps its store when it restarts the workers, and in it the addresses where the earlier ones listened:
    process groups of the new ones then try to connect to them, and fail (github.com/pytorch/pytorch/issues/135712).
    Nothing in the environment tells attempts apart on all machines alike; restarts are counted by each by itself.

    So each rank says hello under a name of its own making. The first rank makes up the prefix and tells it to every
    name that it finds, until all ranks have come: what is left of an earlier attempt gets an answer that nobody reads.

    Raises:
        PipelineTimeoutError: not all ranks came within the timeout.
        StoreLostError: the store's host ended or does not answer.
    """
    common, rank = store.under("pipeline_rendezvous"), store.rank
    name = uuid.uuid4().hex
    if rank == 0:
        _welcome(common, name, world_size, timeout)
        return store.under(name)
    common.set(f"hello/{rank}", name)
    if not common.wait([f"welcome/{name}"], timeout):
        raise PipelineTimeoutError(
            f"rank 0 did not greet rank {rank} of {world_size} within {timeout.total_seconds():g} s: its process did "
            f"not start, or has ended; see what its machine says"
        )
    prefix = common.get(f"welcome/{name}")
    common.set(f"{prefix}/came/{rank}", "")
    return store.under(prefix)


def _welcome(store: BoundedStore, prefix: str, world_size: int, timeout: timedelta) -> None:
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check(f"{prefix}/came/{rank}"):
                missing.remove(rank)
            elif store.check(f"hello/{rank}"):
                store.set(f"welcome/{store.get(f'hello/{rank}')}", prefix)
        if missing and time.monotonic() > deadline:
            stopped = "its process is stopped" if len(missing) == 1 else "their processes are stopped"
            raise PipelineTimeoutError(
                f"{ranks(sorted(missing))} of {world_size} did not start within {timeout.total_seconds():g} s, or "
                f"{stopped}; see what their machines say, or raise the strategy's `timeout`"
            )
        time.sleep(POLL_S)
