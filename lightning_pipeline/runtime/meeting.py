"""The processes of a run meet: each rank is there once, and all count alike, before they connect."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from lightning_pipeline.runtime.errors import PipelineTimeoutError, ranks
from lightning_pipeline.runtime.failure import LINGER_S
from lightning_pipeline.runtime.rendezvous import fresh_store
from lightning_pipeline.runtime.store import BoundedStore, has_agent, in_time

# How often this process came to each place. A process that starts others again, as in a sweep, has been to more places
# than they have.
_meetings: Counter[str] = Counter()


def meet(rank: int, world_size: int, timeout: timedelta) -> BoundedStore:
    """The store that all processes share, once they are there. ``MASTER_ADDR`` and ``MASTER_PORT`` say where.

    ``init_process_group`` would wait for a rank that no process has until its timeout, and not say for which.

    Raises:
        OSError: rank 0's port is taken.
        ValueError: processes count differently, or two of them are the same rank.
        PipelineTimeoutError: ranks that did not come in time.
        StoreLostError: rank 0 came, and then ended or stopped.
    """
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    store = BoundedStore(_reach(where, rank, world_size, timeout), rank=rank, limit=timeout)
    if has_agent():
        store = fresh_store(store, world_size=world_size, timeout=timeout)
    store = store.under(f"meeting/{_meetings[where]}")
    _join(store, where, world_size, timeout)
    _meetings[where] += 1
    return store


def _reach(where: str, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store at rank 0, which makes it."""
    seconds = timeout.total_seconds()
    problem = "something accepts connections there and does not answer"
    try:
        # With a world size of 1 the store is there at once: the waiting is done below. In a thread, as torch waits for
        # ever for the answer of whoever listens there.
        rendezvous = dist.rendezvous("env://", rank, 1, timeout=timeout)
        return in_time(lambda: next(rendezvous)[0], seconds + LINGER_S)
    except TimeoutError:
        pass
    except dist.DistError as error:
        problem = str(error).splitlines()[0]
    if rank == 0 and not has_agent():
        if "EADDRINUSE" not in problem:
            raise OSError(errno.EADDRNOTAVAIL, f"rank 0 cannot host the store of the run at {where}: {problem}")
        raise OSError(
            errno.EADDRINUSE,
            f"rank 0 cannot host the store of the run at {where}: the port is in use, by another program or another "
            f"run on this machine. Set MASTER_PORT to a free one, the same on all nodes, or on one node leave it unset "
            f"(ss -ltnp 'sport = :{where.rpartition(':')[2]}' says who has it)",
        )
    raise PipelineTimeoutError(
        f"rank {rank} of {world_size} did not reach rank 0 at {where} within {seconds:g} s ({problem}); start the "
        f"script on every node, with the same MASTER_ADDR and MASTER_PORT, or see what rank 0 says, or who else has "
        f"the port"
    )


def _join(store: BoundedStore, where: str, world_size: int, timeout: timedelta) -> None:
    rank = store.rank
    me = f"process {os.getpid()} on {socket.gethostname()}"
    holder = store.set_first(f"rank {rank}", me)
    first = json.loads(store.set_first("first", json.dumps([rank, world_size, me])))
    objection = ""
    if holder != me:
        objection = (
            f"{holder} and {me} are both rank {rank}; give each node a NODE_RANK of its own, and each run "
            f"a MASTER_PORT of its own"
        )
    elif first[1] != world_size:
        objection = (
            f"rank {first[0]} ({first[2]}) counts {first[1]} processes and rank {rank} ({me}) counts {world_size}; "
            f"give the Trainer the same devices and num_nodes on every node"
        )
    # Whoever objects first, or else comes last, or waited long enough, speaks for all.
    if store.add("arrived", 1) == world_size or objection:
        store.set_first("verdict", json.dumps({"objection": objection}))
    if not store.wait(["verdict"], timeout):
        late = [other for other in range(world_size) if not store.check(f"rank {other}")]
        told = (
            f"{ranks(late)} of {world_size} did not come to {where} within {timeout.total_seconds():g} s; start the "
            f"script on every node, with the same MASTER_ADDR and MASTER_PORT and the same devices and num_nodes"
        )
        store.set_first("verdict", json.dumps({"late": told}))
    verdict = json.loads(store.get("verdict"))
    objection = objection or verdict.get("objection", "")
    if rank == 0 and (objection or "late" in verdict):
        time.sleep(LINGER_S)  # this process may host the store, and the others are to read it
    if objection:
        raise ValueError(objection)
    if "late" in verdict:
        raise PipelineTimeoutError(verdict["late"])
