"""What ranks ask of the store ends in time and says who did not answer, whatever becomes of its host."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipeline.runtime import rendezvous
from lightning_pipeline.runtime.errors import PipelineTimeoutError
from lightning_pipeline.runtime.store import BoundedStore, Mail, RollCall, StoreLostError
from tests.launching import PATIENCE_S, PRELOADED, SOON_S, free_port

pytestmark = pytest.mark.multiprocess

LIMIT = timedelta(seconds=1)


def serve(port: int, pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # noqa: F841 - it goes on
    pipe.send("there")
    threading.Event().wait()


@contextmanager
def host() -> Iterator[tuple[int, int]]:
    """A process that hosts a store, until it is killed, by its number, and the store's port."""
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(port, writer), daemon=True)
    process.start()
    writer.close()
    assert reader.recv() == "there"
    try:
        yield process.pid, port
    finally:
        process.kill()
        process.join()


def stop(pid: int) -> None:
    """Stop a process, and wait until all of its threads have: until then they answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + SOON_S
    while not all(
        (task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").iterdir()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[int, int]]:
    with host() as found:
        yield found


def connect(port: int) -> BoundedStore:
    gc.collect()  # stores of tests before this one, which errors refer to, are connected to the same port
    patience = timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
    return BoundedStore(store, rank=3, limit=patience)


def torchs_own(store: BoundedStore) -> None:
    with store.asked():
        dist.PrefixStore("group", store.torch).add("ranks", 1)


CALLS: dict[str, Callable[[BoundedStore], Any]] = {
    "get": lambda store: store.get("there"),
    "multi_get": lambda store: store.multi_get(["there"]),
    "add": lambda store: store.add("number", 1),
    "set_first": lambda store: store.set_first("first", "3"),
    "check": lambda store: store.check("there"),
    "wait": lambda store: store.wait(["nowhere"], LIMIT),
    "clone": lambda store: store.clone(),
    "torch": torchs_own,
    "mail": lambda store: Mail(store).next(3, LIMIT),
    "roll": lambda store: RollCall(Mail(store), [0]),
}


def test_no_call_waits_for_ever_for_a_stopped_host() -> None:
    def outcome(name: str) -> tuple[str, float]:
        started = time.monotonic()
        with pytest.raises(StoreLostError) as error:
            CALLS[name](stores[name])
        assert error.value.failure.rank == 0
        with pytest.raises(StoreLostError):  # a late answer would be taken for that to this question
            stores[name].check("there")
        return str(error.value), time.monotonic() - started

    with host() as (pid, port):
        shared = connect(port)
        stores = {name: shared.clone() for name in CALLS}
        shared.set("there", "1")
        for store in stores.values():
            store.put_limit(LIMIT)
        stop(pid)
        with ThreadPoolExecutor(len(CALLS)) as threads:
            futures = {name: threads.submit(outcome, name) for name in CALLS}
            for name, future in futures.items():
                told, seconds = future.result(SOON_S)
                assert "rank 3 waited 1 s for an answer of rank 0, which hosts the store of the run" in told, name
                assert f"127.0.0.1:{port}: its process is stopped, or its machine or the network is gone" in told
                assert 0.9 < seconds < SOON_S


def test_a_host_that_stops_for_a_while_is_waited_for(shared: Any) -> None:
    pid, port = shared
    store = connect(port)
    assert store.add("counted", 1) == 1
    stop(pid)
    threading.Timer(1.5, os.kill, [pid, signal.SIGCONT]).start()
    assert store.add("counted", 1) == 2
    assert not store.wait(["nowhere"], timedelta(seconds=0.1))
    assert store.get("counted") == "2"


def test_a_host_that_ends_is_told(shared: Any) -> None:
    with host() as (pid, port):
        store = connect(port)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StoreLostError, match=r"rank 3 lost its connection to rank 0, .*: its process has ended"):
            store.check("there")


def test_shutting_a_connection_down_ends_a_wait_on_it_alone(shared: Any) -> None:
    store = connect(shared[1])
    watching = store.clone()
    threading.Timer(0.3, watching.shut_down).start()
    with pytest.raises(StoreLostError):
        watching.wait(["nowhere"], timedelta(seconds=PATIENCE_S))
    assert store.add("after", 1) == 1


def time_limits(store: BoundedStore) -> list[bytes]:
    return [limit_of(one.number) for one in store._connections]


def limit_of(number: int) -> bytes:
    connection = socket.socket(fileno=os.dup(number))
    try:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
    finally:
        connection.close()


def test_each_connection_has_a_limit_of_its_own(shared: Any) -> None:
    store = connect(shared[1])
    clone = store.clone()
    before = time_limits(store), time_limits(clone)
    assert [len(limits) for limits in before] == [1, 1]
    store.hurry()
    again = BoundedStore(store.torch, rank=3, limit=timedelta(seconds=7))
    assert time_limits(again) == time_limits(store) != before[0]
    assert time_limits(clone) == before[1]
    assert again.torch.timeout == timedelta(seconds=7)


def test_what_has_got_the_number_of_a_closed_connection_is_left_alone(shared: Any) -> None:
    store = connect(shared[1])
    [(number, _)] = store._connections
    mine, other = socket.socketpair()
    with mine, other:
        before = limit_of(mine.fileno())
        os.dup2(mine.fileno(), number)
        store.hurry()
        store.shut_down()
        assert limit_of(mine.fileno()) == before
        other.sendall(b"open")
        assert mine.recv(4) == b"open"


@contextmanager
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Somebody who never answers listens where the ranks are to meet."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        yield


def test_who_does_not_answer_is_not_taken_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.2)
    with taken(monkeypatch), pytest.raises(PipelineTimeoutError) as error:
        rendezvous.meet(1, 2, LIMIT)
    assert "rank 1 of 2 did not reach rank 0 at 127.0.0.1:" in str(error.value)
    assert "something accepts connections there and does not answer" in str(error.value)
