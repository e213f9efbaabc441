"""A store that no earlier attempt of the same run has written to."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from lightning_pipeline.runtime.agreement import ranks
from lightning_pipeline.runtime.failure import PipelineTimeoutError

POLL_S = 0.02


def fresh_store(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> Store:
    """`store` under a prefix that all ranks of this attempt come to know, and none of an earlier one knew.

    torchrun keeps its store when it restarts the workers, and in it the addresses where the earlier ones listened:
    process groups of the new ones then try to connect to them, and fail (github.com/pytorch/pytorch/issues/135712).
    Nothing in the environment tells attempts apart on all machines alike; restarts are counted by each by itself.

    So each rank says hello under a name of its own making. The first rank makes up the prefix and tells it to every
    name that it finds, until all ranks have come: what is left of an earlier attempt gets an answer that nobody reads.

    Raises:
        PipelineTimeoutError: not all ranks came within the timeout.
    """
    common = PrefixStore("pipeline_rendezvous", store)
    name = uuid.uuid4().hex
    if rank == 0:
        _welcome(common, name, world_size, timeout)
        return PrefixStore(name, store)
    common.set(f"hello/{rank}", name)
    try:
        common.wait([f"welcome/{name}"], timeout)
    except RuntimeError as error:
        raise PipelineTimeoutError(
            f"rank 0 did not greet rank {rank} of {world_size} within {timeout.total_seconds():g} s: its process did "
            f"not start, or has ended; see what its machine says"
        ) from error
    prefix = common.get(f"welcome/{name}").decode()
    common.set(f"{prefix}/came/{rank}", "")
    return PrefixStore(prefix, store)


def _welcome(store: Store, prefix: str, world_size: int, timeout: timedelta) -> None:
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([f"{prefix}/came/{rank}"]):
                missing.remove(rank)
            elif store.check([f"hello/{rank}"]):
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", prefix)
        if missing and time.monotonic() > deadline:
            raise PipelineTimeoutError(
                f"{ranks(sorted(missing))} of {world_size} did not start within {timeout.total_seconds():g} s; see "
                f"what their machines say, or raise the strategy's `timeout`"
            )
        time.sleep(POLL_S)
