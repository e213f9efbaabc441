"""The processes of a run meet: each rank is there once, and all count alike, before they connect."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lightning_pipeline.runtime.agreement import ranks
from lightning_pipeline.runtime.failure import LINGER_S, PipelineTimeoutError
from lightning_pipeline.runtime.rendezvous import fresh_store

POLL_S = 0.02
ANSWER_S = 5.0  # how long a second rank 0 waits for what listens in its place: it may be no store

# How often this process came to each place. A process that starts others again, as in a sweep, has been to more places
# than they have.
_meetings: Counter[str] = Counter()


def meet(
    rank: int, world_size: int, timeout: timedelta, *, way_out: str = "", lost: Callable[[], str] | None = None
) -> Store:
    """The store that all processes share, once they are there. ``MASTER_ADDR`` and ``MASTER_PORT`` say where.

    ``init_process_group`` would wait for a rank that no process has until its timeout, and not say for which.

    Args:
        way_out: what to do where ranks are missing or there twice; default: what a user of several nodes can do.
        lost: names the processes that have ended, of those that this one has started; "" while there are none.

    Raises:
        ValueError: processes count differently, or two of them are the same rank.
        RuntimeError: a process ended that one of them had started.
        PipelineTimeoutError: ranks that did not come in time.
    """
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        # With a world size of 1 the store is there at once: the waiting is done below.
        store = next(dist.rendezvous("env://", rank, 1, timeout=timeout))[0]
    except dist.DistError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            store = _store_of_another(where, world_size, way_out)
        else:
            raise PipelineTimeoutError(
                f"rank {rank} of {world_size} did not reach rank 0 at {where} within {timeout.total_seconds():g} s "
                f"({str(error).splitlines()[0]}); "
                + (way_out or "start the script on every node, with the same MASTER_ADDR and MASTER_PORT")
                + ", or see what rank 0 says"
            ) from None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = fresh_store(store, rank=rank, world_size=world_size, timeout=timeout)
    store = PrefixStore(f"meeting/{_meetings[where]}", store)
    _join(store, rank, world_size, timeout, way_out, lost)
    _meetings[where] += 1
    return store


def _store_of_another(where: str, world_size: int, way_out: str) -> Store:
    """The store of the process that already listens where rank 0 does: it is to hear, too, that it is not alone.

    In a thread: a connection to something else may wait for its answer for ever.
    """
    found: list[Store] = []

    def connect() -> None:
        try:
            found.append(next(dist.rendezvous("env://", 1, 1, timeout=timedelta(seconds=ANSWER_S)))[0])
        except dist.DistError:
            return

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if not found:
        raise ValueError(
            f"rank 0 of {world_size} cannot listen at {where}, where another program does; set another MASTER_PORT"
            + (f", or {way_out}" if way_out else "")
        )
    return found[0]


def _join(
    store: Store, rank: int, world_size: int, timeout: timedelta, way_out: str, lost: Callable[[], str] | None
) -> None:
    me = f"process {os.getpid()} on {socket.gethostname()}"
    holder = store.compare_set(f"rank {rank}", "", me).decode()
    first = json.loads(store.compare_set("first", "", json.dumps([rank, world_size, me])))
    objection = ""
    if holder != me:
        objection = f"{holder} and {me} are both rank {rank}; {way_out or 'give each node a NODE_RANK of its own'}"
    elif first[1] != world_size:
        objection = (
            f"rank {first[0]} ({first[2]}) counts {first[1]} processes and rank {rank} ({me}) counts {world_size}; "
            f"give the Trainer the same devices and num_nodes on every node"
        )
    # Whoever objects first, or else comes last, has lost a process or waited long enough, speaks for all.
    if store.add("arrived", 1) == world_size or objection:
        store.compare_set("verdict", "", json.dumps({"objection": objection}))
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        if lost is None:
            store.wait(["verdict"], timeout)
        else:
            _wait_without_loss(store, timeout, lost)
    except RuntimeError:
        late = [other for other in range(world_size) if not store.check([f"rank {other}"])]
        told = f"{ranks(late)} of {world_size} did not come to {where} within {timeout.total_seconds():g} s; " + (
            way_out
            or "start the script on every node, with the same MASTER_ADDR and MASTER_PORT and the same devices and "
            "num_nodes"
        )
        store.compare_set("verdict", "", json.dumps({"late": told}))
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


def _wait_without_loss(store: Store, timeout: timedelta, lost: Callable[[], str]) -> None:
    """Wait for the verdict, which may be that a process is lost. A RuntimeError says that there is none in time."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(["verdict"]):
        told = lost()
        if told:
            told = f"{told} before all ranks had met; see what it says"
            store.compare_set("verdict", "", json.dumps({"lost": told}))
        elif time.monotonic() > deadline:
            raise RuntimeError
        time.sleep(POLL_S)
