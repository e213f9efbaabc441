"""The rendezvous of a run's processes: each rank is there once, and all agree on how many there are."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch.distributed import Store

from lightning_pipeline.runtime.errors import PipelineTimeoutError, ranks
from lightning_pipeline.runtime.failure import LINGER_S
from lightning_pipeline.runtime.store import BoundedStore, has_agent, in_time

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


ANSWER_S = 5.0  # how long a second rank 0 waits for what listens in its place: it may be no store
EVERY_NODE = "start the script on every node, with the same MASTER_ADDR and MASTER_PORT"

# How often this process came to each place. A process that starts others again, as in a sweep, has been to more places
# than they have.
_meetings: Counter[str] = Counter()


class Started(Protocol):
    """Processes that this one has started."""

    def told(self) -> str:
        """Names those that have failed; "" while there are none."""

    def told_of(self, ranks: Sequence[int]) -> str:
        """Says what some of them do, of which nothing comes; "" where none is one of them."""


def meet(
    rank: int, world_size: int, timeout: timedelta, *, way_out: str = "", started: Started | None = None
) -> BoundedStore:
    """The store that all processes share, once they are there. ``MASTER_ADDR`` and ``MASTER_PORT`` say where.

    ``init_process_group`` would wait for a rank that no process has until its timeout, and not say for which.

    Args:
        way_out: what to do where ranks are missing or there twice; default: what a user of several nodes can do.
        started: the processes that this one has started.

    Raises:
        ValueError: processes count differently, two of them are the same rank, or another program has rank 0's port.
        RuntimeError: a process ended that one of them had started.
        PipelineTimeoutError: ranks that did not come in time.
        StoreLostError: rank 0 came, and then ended or stopped.
    """
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    store = BoundedStore(_reach(where, rank, world_size, timeout, way_out), rank=rank, limit=timeout)
    if has_agent():
        store = fresh_store(store, world_size=world_size, timeout=timeout)
    store = store.under(f"meeting/{_meetings[where]}")
    _join(store, where, world_size, timeout, way_out, started)
    _meetings[where] += 1
    return store


def _reach(where: str, rank: int, world_size: int, timeout: timedelta, way_out: str) -> Store:
    """The store at rank 0, which makes it."""
    seconds = timeout.total_seconds()
    try:
        return _connect(rank, timeout, seconds + LINGER_S)
    except TimeoutError:
        problem = "something accepts connections there and does not answer"
    except dist.DistError as error:
        problem = str(error).splitlines()[0]
        if rank == 0 and "EADDRINUSE" in problem:
            return _store_of_another(where, world_size, way_out)
    raise PipelineTimeoutError(
        f"rank {rank} of {world_size} did not reach rank 0 at {where} within {seconds:g} s ({problem}); "
        f"{way_out or EVERY_NODE}, or see what rank 0 says, or who else has the port"
    )


def _store_of_another(where: str, world_size: int, way_out: str) -> Store:
    """The store of the process that already listens where rank 0 does: it is to hear, too, that it is not alone."""
    try:
        return _connect(1, timedelta(seconds=ANSWER_S), ANSWER_S)
    except (TimeoutError, dist.DistError):
        port = where.rpartition(":")[2]
        other = f"leave it unset on a single node (ss -ltnp 'sport = :{port}' says who has this one)"
        raise ValueError(
            f"rank 0 of {world_size} cannot listen at {where}, where another program does; set another MASTER_PORT, or "
            f"{way_out or other}"
        ) from None


def _connect(rank: int, timeout: timedelta, seconds: float) -> Store:
    """The store, which rank 0 makes. In a thread: torch waits for ever for the answer of whoever listens there."""
    # With a world size of 1 it is there at once: the waiting is done below.
    if rank == 0 and not has_agent() and (listening := _listening_on_loopback()) is not None:
        address, port = listening.getsockname()
        return dist.TCPStore(address, port, 1, True, timeout, multi_tenant=True, master_listen_fd=listening.detach())
    rendezvous = dist.rendezvous("env://", rank, 1, timeout=timeout)
    return in_time(lambda: next(rendezvous)[0], seconds)


def _listening_on_loopback() -> socket.socket | None:
    """A socket for ranks of this machine alone; None where they come from others, or the port is not free.

    Torch's own listens on all addresses, by IPv6, and its store asks DNS for the name of who connects, in the one
    thread that answers all ranks: it takes 127.0.0.1 for ::ffff:127.0.0.1, which /etc/hosts does not know, and where
    DNS does not answer each connection stops all ranks for seconds (github.com/pytorch/pytorch/issues/159007).
    """
    address = os.environ["MASTER_ADDR"]
    if not address.startswith("127."):
        return None
    try:
        return socket.create_server((address, int(os.environ["MASTER_PORT"])), backlog=socket.SOMAXCONN)
    except OSError:  # torch's says what is wrong, and knows the stores of this process
        return None


def _join(
    store: BoundedStore,
    where: str,
    world_size: int,
    timeout: timedelta,
    way_out: str,
    started: Started | None,
) -> None:
    rank = store.rank
    me = f"process {os.getpid()} on {socket.gethostname()}"
    holder = store.set_first(f"rank {rank}", me)
    first = json.loads(store.set_first("first", json.dumps([rank, world_size, me])))
    objection = ""
    if holder != me:
        of_its_own = "give each node a NODE_RANK of its own, and each run a MASTER_PORT of its own"
        objection = f"{holder} and {me} are both rank {rank}; {way_out or of_its_own}"
    elif first[1] != world_size:
        objection = (
            f"rank {first[0]} ({first[2]}) counts {first[1]} processes and rank {rank} ({me}) counts {world_size}; "
            f"give the Trainer the same devices and num_nodes on every node"
        )
    # Whoever objects first, or else comes last, has lost a process or waited long enough, speaks for all. Who objects
    # does so before it counts as arrived: another one that comes last would find nothing wrong.
    if objection or store.add("arrived", 1) == world_size:
        store.set_first("verdict", json.dumps({"objection": objection}))
    if not _wait_without_loss(store, timeout, started):
        late = [other for other in range(world_size) if not store.check(f"rank {other}")]
        told = f"{ranks(late)} of {world_size} did not come to {where} within {timeout.total_seconds():g} s; "
        if seen := started.told_of(late) if started is not None else "":
            told += f"{seen}: see what it says, or allow more time with timeout="
        else:
            told += way_out or f"{EVERY_NODE} and the same devices and num_nodes"
        store.set_first("verdict", json.dumps({"late": told}))
    verdict = json.loads(store.get("verdict"))
    objection = objection or verdict.get("objection", "")
    if rank == 0 and (objection or "late" in verdict or "lost" in verdict):
        time.sleep(LINGER_S)  # this process may host the store, and the others are to read it
    if objection:
        raise ValueError(objection)
    if "lost" in verdict:
        raise RuntimeError(verdict["lost"])
    if "late" in verdict:
        raise PipelineTimeoutError(verdict["late"])


def _wait_without_loss(store: BoundedStore, timeout: timedelta, started: Started | None) -> bool:
    """Whether the verdict came in time; it may be that a process is lost."""

    def look() -> None:
        if started is not None and (told := started.told()):
            store.set_first("verdict", json.dumps({"lost": f"{told} before all ranks had met; see what it says"}))

    return store.wait_looking(["verdict"], timeout, look)
