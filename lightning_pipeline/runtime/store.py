"""A store client whose calls time out even if the store's host is stopped or gone."""

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
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lightning_pipeline.runtime.errors import STOPPED, Failure, PeerFailedError

T = TypeVar("T")
GRACE_S = 2.0  # how long an answer may take that no rank depends on: when a wait is given up, and once a run has failed
GLANCE_S = 0.3  # the longest between two looks at what else may end a wait
_connecting = threading.Lock()


class _Connection(NamedTuple):
    """A file descriptor, and what it is of: once closed, the system gives the number to what is opened next."""

    number: int
    inode: int


_of_clones: set[_Connection] = set()


class StoreLostError(PeerFailedError):
    """The process that hosts the store ended or does not answer."""


class BoundedStore:
    """What a rank asks of the store that all ranks share.

    The timeout of torch's own client bounds how long its host waits for a key, and not how long the client waits for
    its host: once a host's process is stopped, or its machine is gone without a word, each call but ``set`` blocks for
    ever, ``wait`` with a timeout included. So the limit is put on the connection, as the system's own timeout for
    receiving and sending, which holds for the calls that torch makes itself as well, when it makes process groups. It
    takes no thread, which a process that fails for want of threads could not start. An answer that comes too late would
    be taken for that to the next question, so a connection on which the limit has passed is shut down.

    A connection serves one call at a time: another thread's wait keeps a call from being made.

    Args:
        store: torch's; one that is not reached over TCP answers at once, and has no limit.
        rank: this process, for messages.
        limit: seconds that an answer may take, from now on and for all that use `store`.
    """

    def __init__(self, store: Store, *, rank: int, limit: timedelta) -> None:
        self.torch = store
        """For those that take torch's."""
        self.rank = rank
        self.limit = limit.total_seconds()
        self._connections: list[_Connection] = []
        self._place = ""
        root = getattr(store, "_underlying_non_prefix_store", store)
        if isinstance(root, dist.TCPStore):
            self._place = f"{root.host}:{root.port}"
            self._connections = [one for one in _connections_to(root.port) if one not in _of_clones]
            self.put_limit(limit)  # which may be what an earlier run has left

    def under(self, prefix: str) -> BoundedStore:
        """The same connection, with other keys."""
        return self._like(PrefixStore(prefix, self.torch), self._connections)

    def clone(self) -> BoundedStore:
        """The same keys over a connection of its own.

        Raises:
            StoreLostError: the host did not accept it in time.
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
        """The value of a key that is there."""
        with self.asked():
            return self.torch.get(key).decode()

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        """The values of keys that are there."""
        with self.asked():
            return [value.decode() for value in self.torch.multi_get(list(keys))]

    def add(self, key: str, number: int) -> int:
        with self.asked():
            return self.torch.add(key, number)

    def set_first(self, key: str, value: str) -> str:
        """Set a key that is not there yet. Returns what it is now."""
        with self.asked():
            return self.torch.compare_set(key, "", value).decode()

    def check(self, *keys: str) -> bool:
        """Whether these keys are there."""
        with self.asked():
            return self.torch.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta, *, limit: float = GRACE_S) -> bool:
        """Whether the keys came within the timeout.

        Args:
            limit: seconds that the host may take, when the time is over, to answer that it is.

        Raises:
            StoreLostError: the host ended, or did not answer.
        """
        with self.asked(min(limit, self.limit)):
            try:
                self.torch.wait(list(keys), timeout)
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # what it is depends on the kind of store
                return False
        return True

    def wait_looking(self, keys: Sequence[str], timeout: timedelta, look: Callable[[], object]) -> bool:
        """As `wait`, with a look every now and then at what else may end it, by raising or by setting a key."""
        began = time.monotonic()
        # Not torch's wait with a short timeout, which logs a warning each time.
        while not self.check(*keys):
            waited = time.monotonic() - began
            if waited > timeout.total_seconds():
                return False
            look()
            time.sleep(min(GLANCE_S, 0.005 + waited / 10))
        return True

    @contextmanager
    def asked(self, limit: float | None = None) -> Iterator[None]:
        """Around calls that this store or torch makes with it, whose errors then say who did not answer.

        Args:
            limit: seconds that an answer may take; default: this store's.

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
            raise self._lost(error, min(limit, self.limit)) from None  # which may be less by now
        finally:
            if limit != self.limit:
                self._put_limit(self.limit)

    def put_limit(self, limit: timedelta) -> None:
        """From now on an answer may take so long."""
        self.limit = limit.total_seconds()
        self._put_limit(self.limit)
        if self._connections:
            self.torch.set_timeout(limit)  # of a get, which first waits for its key

    def hurry(self) -> None:
        """From now on a host has a moment to answer: the run has failed, and others wait for this rank to say so."""
        self.put_limit(timedelta(seconds=min(self.limit, GRACE_S)))

    def shut_down(self) -> None:
        """End the connection, and with it any call that waits in another thread. Never raises."""
        for one in self._connections:
            with contextlib.suppress(OSError), _opened(one) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def _like(self, store: Store, connections: list[_Connection]) -> BoundedStore:
        own = object.__new__(BoundedStore)
        own.torch, own.rank, own.limit = store, self.rank, self.limit
        own._connections, own._place = connections, self._place
        return own

    def _put_limit(self, seconds: float) -> None:
        seconds = max(seconds, 0.001)  # 0 is no limit
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for one in self._connections:
            with contextlib.suppress(OSError), _opened(one) as connection:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    connection.setsockopt(socket.SOL_SOCKET, option, value)

    def _lost(self, error: RuntimeError | None, limit: float) -> StoreLostError:
        """What there is to raise of an answer that did not come, or of a connection that broke."""
        host = "the launcher's agent" if has_agent() else "rank 0"
        place = f"{host}, which hosts the store of the run at {self._place}"
        if error is None or "timeout" in str(error).lower():
            summary = f"it did not answer within {limit:g} s: {STOPPED}"
            told = f"rank {self.rank} waited {limit:g} s for an answer of {place}: {STOPPED}; look after its machine"
        else:
            summary = "its process ended or lost its connections, and so did the store it hosts"
            told = f"rank {self.rank} lost its connection to {place}: its process has ended; see what it says"
        if has_agent():
            return StoreLostError(told, Failure(None, f"{host} lost the store ({summary})"))
        return StoreLostError(told, Failure(0, summary, is_gone=True))


def has_agent() -> bool:
    """Whether torchrun's agent hosts the store, in place of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def in_time(call: Callable[[], T], seconds: float) -> T:
    """What `call` returns, or raises. It runs in a thread, which goes on if it does not return in time.

    Raises:
        TimeoutError: it did not.
    """
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not result:
        raise TimeoutError
    return result[0]


def _connections_to(port: int) -> list[_Connection]:
    """This process's connections to a port, of any machine. None on Windows."""
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
    """Its socket, which stays open.

    Raises:
        OSError: it has been closed, or is no socket.
    """
    if os.fstat(one.number).st_ino != one.inode:
        raise OSError(f"{one} has been closed")
    connection = socket.socket(fileno=one.number)
    try:
        if socket.getdefaulttimeout() is not None:  # which Python has put on it
            connection.setblocking(True)
        yield connection
    finally:
        connection.detach()


class Mail:
    """One rank's end. Each rank's messages arrive in one order, whoever wrote them.

    Args:
        store: over a connection that no wait of another thread holds.
    """

    def __init__(self, store: BoundedStore) -> None:
        self.store = store
        self._read = 0
        self._known: Counter[int] = Counter()

    def send(self, rank: int, message: str) -> None:
        """Send a message that nobody else sends to this rank."""
        while self.store.set_first(f"{rank}/{self._known[rank]}", message) != message:
            self._known[rank] += 1

    def next(self, rank: int, timeout: timedelta) -> str | None:
        """The rank's next message; None if none came within the timeout."""
        key = f"{rank}/{self._read}"
        if not self.store.wait([key], timeout, limit=self.store.limit):
            return None
        self._read += 1
        return self.store.get(key)


class RollCall:
    """Asks ranks for an answer, which whoever reads their mail gives: ``store.set(f"{call}/{rank}", "")``."""

    def __init__(self, mail: Mail, ranks: Iterable[int]) -> None:
        self._store = mail.store
        self._name = f"call {uuid.uuid4().hex}"
        self._missing = list(ranks)
        for rank in self._missing:
            mail.send(rank, json.dumps({"call": self._name}))

    def missing(self) -> list[int]:
        """Ranks that have not answered, and have not closed their mail."""
        keys = (f"{self._name}/{{}}", "closed/{}")
        self._missing = [rank for rank in self._missing if not any(self._store.check(key.format(rank)) for key in keys)]
        return self._missing
