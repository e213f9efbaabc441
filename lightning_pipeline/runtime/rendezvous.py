"""The rendezvous of a run's processes, which checks that each rank exists once and all count the same processes."""

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
    """`store` with a prefix that all ranks of this attempt share, and none of an earlier attempt.

    torchrun keeps its store when it restarts the workers, with the addresses where the earlier ones listened. Process
    groups of the new workers try to connect there, and fail (github.com/pytorch/pytorch/issues/135712). No variable of
    the environment tells attempts apart on all machines, as each machine counts its own restarts.

    So each rank says hello under a random name. Rank 0 makes up the prefix and sends it to every name that it finds,
    until all ranks have come. Names that are left from an earlier attempt get an answer that nobody reads.

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


ANSWER_S = 5.0  # how long a second rank 0 waits for whoever listens at its address, which may be no store
EVERY_NODE = "start the script on every node, with the same MASTER_ADDR and MASTER_PORT"

# How often this process met others at each address. It is counted by address, as a process that starts others, for
# instance in a sweep, has been to more of them than these have.
_meetings: Counter[str] = Counter()


class Started(Protocol):
    """The processes that this one has started."""

    def told(self) -> str:
        """Names processes that have failed; "" if there are none."""

    def told_of(self, ranks: Sequence[int]) -> str:
        """Tells what those of some ranks do, which did not come; "" if none is of these ranks."""


def meet(
    rank: int, world_size: int, timeout: timedelta, *, way_out: str = "", started: Started | None = None
) -> BoundedStore:
    """Wait for all processes at ``MASTER_ADDR`` and ``MASTER_PORT``. Returns the store that they share.

    ``init_process_group`` alone would wait for a missing rank until its timeout, and not tell which.

    Args:
        way_out: what to do if ranks are missing or exist twice; default: what a user of several nodes can do.
        started: the processes that this one has started.

    Raises:
        ValueError: processes have different world sizes or the same rank, or another program has rank 0's port.
        RuntimeError: a process ended that one of them had started.
        PipelineTimeoutError: ranks did not come in time.
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
    """The store that rank 0 hosts."""
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
    """The store of the process that already listens at rank 0's address, if it is a second rank 0.

    Then both find out, and both raise.
    """
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
    """The store, which rank 0 makes. A thread bounds the wait, as torch waits forever for whoever listens there."""
    # With a world size of 1 torch does not wait for the other ranks, which `_join` does.
    if rank == 0 and not has_agent() and (listening := _listening_on_loopback()) is not None:
        address, port = listening.getsockname()
        return dist.TCPStore(address, port, 1, True, timeout, multi_tenant=True, master_listen_fd=listening.detach())
    rendezvous = dist.rendezvous("env://", rank, 1, timeout=timeout)
    return in_time(lambda: next(rendezvous)[0], seconds)


def _listening_on_loopback() -> socket.socket | None:
    """A socket for ranks of this machine alone; None if ranks come from other machines, or the port is not free.

    Torch's socket listens on all addresses, by IPv6, and its store asks DNS for the name of each client, in the one
    thread that answers all ranks. It sees 127.0.0.1 as ::ffff:127.0.0.1, which /etc/hosts does not list; if DNS does
    not answer, each connection stops all ranks for seconds (github.com/pytorch/pytorch/issues/159007).
    """
    address = os.environ["MASTER_ADDR"]
    if not address.startswith("127."):
        return None
    try:
        return socket.create_server((address, int(os.environ["MASTER_PORT"])), backlog=socket.SOMAXCONN)
    except OSError:  # torch's own attempt tells what is wrong, and may reuse a store of this process
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
    # The verdict for all ranks comes from the first one that objects, that comes last, that has lost a process or has
    # waited long enough. An objection comes before the rank counts as arrived, or the last one would find all in order.
    if objection or store.add("arrived", 1) == world_size:
        store.set_first("verdict", json.dumps({"objection": objection} if objection else {}))

    def look() -> None:
        if started is not None and (failed := started.told()):
            store.set_first("verdict", json.dumps({"lost": f"{failed} before all ranks had met; see what it says"}))

    if not store.wait_looking(["verdict"], timeout, look):
        late = [other for other in range(world_size) if not store.check(f"rank {other}")]
        message = f"{ranks(late)} of {world_size} did not come to {where} within {timeout.total_seconds():g} s; "
        if seen := started.told_of(late) if started is not None else "":
            message += f"{seen}: see what it says, or allow more time with timeout="
        else:
            message += way_out or f"{EVERY_NODE} and the same devices and num_nodes"
        store.set_first("verdict", json.dumps({"late": message}))
    verdict = {"objection": objection} if objection else json.loads(store.get("verdict"))
    for kind, text in verdict.items():
        if rank == 0:
            time.sleep(LINGER_S)  # this process may host the store, where the others read the verdict
        raise {"objection": ValueError, "lost": RuntimeError, "late": PipelineTimeoutError}[kind](text)
