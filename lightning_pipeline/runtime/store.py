"""A client of the store that all ranks share. Its calls time out even if the store's host is stopped or gone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lightning_pipeline.runtime.errors import STOPPED, Failure, PeerFailedError

T = TypeVar("T")
GRACE_S = 2.0  # the limit of an answer that no rank depends on: after a wait that timed out, and once a run has failed
GLANCE_S = 0.3  # the longest pause between two looks at what else may end a wait
_connecting = threading.Lock()


class _Connection(NamedTuple):
    """A file descriptor with the inode of its socket, as the system reuses the number once it is closed."""

    number: int
    inode: int


_of_clones: set[_Connection] = set()


class StoreLostError(PeerFailedError):
    """The process that hosts the store ended or does not answer."""


class BoundedStore:
    """One rank's client of the store that all ranks share.

    The timeout of torch's client bounds how long the host waits for a key, and not how long the client waits for the
    host: if the host's process is stopped, or its machine disappears, every call but ``set`` blocks forever, even
    ``wait`` with a timeout. So the limit is set on the socket, as the system's own timeout for receiving and sending.
    It then also holds for calls that torch makes itself, when it makes process groups. It needs no thread, which a
    process that fails for want of threads could not start. A late answer would be taken for the answer to the next
    call, so a connection is shut down when its limit has passed.

    A connection serves one call at a time: a call waits for another thread's wait.

    Args:
        store: torch's store; one that is not reached over TCP has no limit.
        rank: this process, for messages.
        limit: the longest that an answer may take, from now on and for everyone who uses `store`.
    """

    def __init__(self, store: Store, *, rank: int, limit: timedelta) -> None:
        self.torch = store
        """Torch's own client of this store."""
        self.rank = rank
        self.limit = limit.total_seconds()
        self._connections: list[_Connection] = []
        self._place = ""
        root = getattr(store, "_underlying_non_prefix_store", store)
        if isinstance(root, dist.TCPStore):
            self._place = f"{root.host}:{root.port}"
            self._connections = [one for one in _connections_to(root.port) if one not in _of_clones]
            self.put_limit(limit)  # in place of what an earlier run may have left

    def under(self, prefix: str) -> BoundedStore:
        """The same connection, with a prefix on all keys."""
        return self._like(PrefixStore(prefix, self.torch), self._connections)

    def clone(self) -> BoundedStore:
        """The same keys over a connection of their own.

        Raises:
            StoreLostError: the host did not accept the connection in time.
        """
        if not self._connections:
            return self._like(self.torch.clone(), [])  # type: ignore[attr-defined]
        port = int(self._place.rpartition(":")[2])
        with _connecting:
            before = _connections_to(port)
            try:
                store = in_time(self.torch.clone, self.limit)  # type: ignore[attr-defined]
            except TimeoutError:
                raise self._lost(None, self.limit) from None
            except RuntimeError as error:
                raise self._lost(error, self.limit) from error
            own = self._like(store, [one for one in _connections_to(port) if one not in before])
            _of_clones.update(own._connections)
        own.put_limit(timedelta(seconds=self.limit))
        return own

    def set(self, key: str, value: str) -> None:
        with self.asked():
            self.torch.set(key, value)

    def get(self, key: str) -> str:
        """The value of a key, which must exist."""
        with self.asked():
            return self.torch.get(key).decode()

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        """The values of keys, which must exist."""
        with self.asked():
            return [value.decode() for value in self.torch.multi_get(list(keys))]

    def add(self, key: str, number: int) -> int:
        with self.asked():
            return self.torch.add(key, number)

    def set_first(self, key: str, value: str) -> str:
        """Set a key if it does not exist. Returns its value, which may be another rank's."""
        with self.asked():
            return self.torch.compare_set(key, "", value).decode()

    def check(self, *keys: str) -> bool:
        """Whether all of these keys exist."""
        with self.asked():
            return self.torch.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta, *, limit: float = GRACE_S) -> bool:
        """Whether the keys came within the timeout.

        Args:
            limit: seconds that the host may take, once the time is over, to say so.

        Raises:
            StoreLostError: the host ended, or did not answer.
        """
        with self.asked(min(limit, self.limit)):
            try:
                self.torch.wait(list(keys), timeout)
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # a timeout, which has another type in each kind of store
                return False
        return True

    def wait_looking(self, keys: Sequence[str], timeout: timedelta, look: Callable[[], object]) -> bool:
        """As `wait`, but calls `look` every now and then, which may end it by raising or by setting a key."""
        began = time.monotonic()
        # Torch's own wait with a short timeout logs a warning each time.
        while not self.check(*keys):
            waited = time.monotonic() - began
            if waited > timeout.total_seconds():
                return False
            look()
            time.sleep(min(GLANCE_S, 0.005 + waited / 10))
        return True

    @contextmanager
    def asked(self, limit: float | None = None) -> Iterator[None]:
        """Wraps calls to the store, by this class or by torch, so that their errors tell who did not answer.

        Args:
            limit: seconds that an answer may take; default: this store's limit.

        Raises:
            StoreLostError: the host ended or did not answer.
        """
        limit = self.limit if limit is None else limit
        if limit != self.limit:
            self._put_limit(limit)
        try:
            yield
        except dist.DistNetworkError as error:
            self.shut_down()
            raise self._lost(error, min(limit, self.limit)) from None  # `hurry` may have lowered it
        finally:
            if limit != self.limit:
                self._put_limit(self.limit)

    def put_limit(self, limit: timedelta) -> None:
        """Set the longest that an answer may take."""
        self.limit = limit.total_seconds()
        self._put_limit(self.limit)
        if self._connections:
            self.torch.set_timeout(limit)  # torch's get waits for its key first

    def hurry(self) -> None:
        """Lower the limit to a moment: the run has failed, and others wait for this rank to say so."""
        self.put_limit(timedelta(seconds=min(self.limit, GRACE_S)))

    def shut_down(self) -> None:
        """Shut down the connection, which ends a call that waits in another thread. Never raises."""
        for one in self._connections:
            with contextlib.suppress(OSError), _opened(one) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def _like(self, store: Store, connections: list[_Connection]) -> BoundedStore:
        own = object.__new__(BoundedStore)
        own.torch, own.rank, own.limit = store, self.rank, self.limit
        own._connections, own._place = connections, self._place
        return own

    def _put_limit(self, seconds: float) -> None:
        seconds = max(seconds, 0.001)  # to the system, 0 means no limit
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for one in self._connections:
            with contextlib.suppress(OSError), _opened(one) as connection:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    connection.setsockopt(socket.SOL_SOCKET, option, value)

    def _lost(self, error: RuntimeError | None, limit: float) -> StoreLostError:
        """The error of an answer that did not come (`error` is None, or a timeout), or of a connection that broke."""
        host = "the launcher's agent" if has_agent() else "rank 0"
        place = f"{host}, which hosts the store of the run at {self._place}"
        if error is None or "timeout" in str(error).lower():
            summary = f"it did not answer within {limit:g} s: {STOPPED}"
            message = f"rank {self.rank} waited {limit:g} s for an answer of {place}: {STOPPED}; look after its machine"
        else:
            summary = "its process ended or lost its connections, and so did the store it hosts"
            message = f"rank {self.rank} lost its connection to {place}: its process has ended; see what it says"
        if has_agent():
            return StoreLostError(message, Failure(None, f"{host} lost the store ({summary})"))
        return StoreLostError(message, Failure(0, summary, is_gone=True))


def has_agent() -> bool:
    """Whether torchrun's agent hosts the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def in_time(call: Callable[[], T], seconds: float) -> T:
    """What `call` returns or raises. It runs in a daemon thread, which goes on if the time is over.

    Raises:
        TimeoutError: it did not return in time.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except futures.TimeoutError:  # before Python 3.11 it is a class of its own
        raise TimeoutError from None


def _connections_to(port: int) -> list[_Connection]:
    """This process's connections to a port of any machine; empty on Windows."""
    found = []
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with contextlib.suppress(OSError):
            one = _Connection(int(name), os.fstat(int(name)).st_ino)
            with _opened(one) as connection:
                families = (socket.AF_INET, socket.AF_INET6)
                if connection.family in families and connection.type == socket.SOCK_STREAM:
                    peer: Any = connection.getpeername()
                    if peer[1] == port:
                        found.append(one)
    return found


@contextmanager
def _opened(one: _Connection) -> Iterator[socket.socket]:
    """The socket of a connection, which is not closed on exit.

    Raises:
        OSError: it has been closed, or is no socket.
    """
    if os.fstat(one.number).st_ino != one.inode:
        raise OSError(f"{one} has been closed")
    connection = socket.socket(fileno=one.number)
    try:
        if socket.getdefaulttimeout() is not None:  # Python has made it non-blocking
            connection.setblocking(True)
        yield connection
    finally:
        connection.detach()


class Mail:
    """Messages between ranks through the store. Those to one rank have one order, whoever wrote them.

    Args:
        store: over a connection on which no other thread waits.
    """

    def __init__(self, store: BoundedStore) -> None:
        self.store = store
        self._read = 0
        self._known: Counter[int] = Counter()

    def send(self, rank: int, message: str) -> None:
        """Send a message to a rank, to which nobody else sends the same text."""
        while self.store.set_first(f"{rank}/{self._known[rank]}", message) != message:
            self._known[rank] += 1

    def next(self, rank: int, timeout: timedelta) -> str | None:
        """The next message to a rank; None if none came within the timeout."""
        key = f"{rank}/{self._read}"
        if not self.store.wait([key], timeout, limit=self.store.limit):
            return None
        self._read += 1
        return self.store.get(key)


class RollCall:
    """Asks ranks for a sign of life. Whoever reads their mail gives it: ``store.set(f"{call}/{rank}", "")``."""

    def __init__(self, mail: Mail, ranks: Iterable[int]) -> None:
        self._store = mail.store
        self._name = f"call {uuid.uuid4().hex}"
        self._missing = list(ranks)
        for rank in self._missing:
            mail.send(rank, json.dumps({"call": self._name}))

    def missing(self) -> list[int]:
        """Ranks that have neither answered nor closed their mail."""
        keys = (f"{self._name}/{{}}", "closed/{}")
        self._missing = [rank for rank in self._missing if not any(self._store.check(key.format(rank)) for key in keys)]
        return self._missing
