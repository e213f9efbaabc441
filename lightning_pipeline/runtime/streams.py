"""Messages between the ranks of a pipeline in host memory, over TCP connections of their own.

Gloo carries such messages as well, but each of them is announced, asked for and sent by a background thread, which
spins for a lock whose holder may have been descheduled. Where ranks share cores that takes milliseconds. Here a message
leaves and arrives within the call of the thread that needs it:

    send        header and data in one system call; what the system does not take at once, a thread sends
    receive     notes where a message is to go; a thread begins to read it if it is large
    wait        reads what has arrived, whatever it is for, up to the message that is waited for

The system keeps only so much of what nobody reads. So a rank that waits for a send, or for long, has its threads read
what else it expects (`begin`), or two ranks that send to one another would wait forever.

Each connection is for one stream of messages, so that none waits behind those of another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

T = TypeVar("T")
_HEADER = struct.Struct("<qq")  # tag and size in bytes
_BUFFER = 1 << 14  # bytes that are read ahead
LARGE = 1 << 22
"""Bytes from which a receive begins before it is waited for: about as many as the system keeps between two processes of
a machine."""
_LARGE_AFAR = 1 << 16
"""Likewise between machines."""
_PAUSE = timedelta(seconds=0.1)
"""How long nothing comes before a rank that waits looks around."""
_CLOSED, _LATE = "connection closed", "timed out: nothing came"


def _nothing() -> None:
    pass


class Message(Protocol):
    """One that is underway."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta, on_pause: Callable[[], None] = _nothing) -> None:
        """Wait until it has left, or come.

        Args:
            on_pause: called now and then while nothing comes.

        Raises:
            RuntimeError: the connection broke, or the time is over; its text tells which.
        """


class _Departing:
    """A message that a thread sends."""

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts
        self.error = ""
        self.has_ended = threading.Event()

    def is_completed(self) -> bool:
        return self.has_ended.is_set() and not self.error

    def wait(self, timeout: timedelta, on_pause: Callable[[], None] = _nothing) -> None:
        if not self.has_ended.wait(timeout.total_seconds()):
            raise RuntimeError("timed out: the peer does not take what is sent")
        if self.error:
            raise RuntimeError(self.error)


_DEPARTED = _Departing([])
"""One that the system has taken at once."""
_DEPARTED.has_ended.set()


class Arriving:
    """A message that is expected.

    Attributes:
        data: its bytes, once it has come.
    """

    __slots__ = ("_has_begun", "_stream", "data", "has_come", "is_sized")

    def __init__(self, stream: Stream, memory: memoryview | None) -> None:
        self._stream = stream
        self._has_begun = False
        self.is_sized = memory is not None
        self.data: Any = memory
        self.has_come = False

    def is_completed(self) -> bool:
        return self.has_come

    def begin(self) -> None:
        """Have a thread read it, so that the peer can send it."""
        if not self._has_begun:
            self._has_begun = True
            self._stream.begin(self)

    def wait(self, timeout: timedelta, on_pause: Callable[[], None] = _nothing) -> None:
        self._stream.read_up_to(self, timeout, on_pause)


class Stream:
    """A connection to one rank, with messages in both directions. Those with the same tag keep their order.

    Any thread may send, receive and wait; one of those that wait reads for all.

    Attributes:
        route: its name, the same on both ranks.
        num_sent: messages, those included that have not left yet.
        num_received: messages that have come.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(_PAUSE))
        self._connection = connection
        place, peer = connection.getsockname(), connection.getpeername()
        self._large = LARGE if place[0] == peer[0] else _LARGE_AFAR
        self._error = ""
        self.is_closed = False
        self.route = ""
        self.num_sent = self.num_received = 0
        self._sending = threading.Lock()
        self._num_departing = 0
        self._sender = _Background("pipeline-sender")
        self._changed = threading.Condition(threading.Lock())
        self._is_reading = False
        self._num_read = 0  # bytes
        self._reader = _Background("pipeline-reader")
        self._expected: defaultdict[int, deque[Arriving]] = defaultdict(deque)
        self._early: defaultdict[int, deque[memoryview]] = defaultdict(deque)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._ahead = self._buffer[:0]  # what has been read ahead
        _open.add(self)

    def send(self, data: bytes | memoryview, tag: int = 0) -> Message:
        """Send bytes, which must not change until they have left. Never waits.

        Raises:
            RuntimeError: the connection is broken.
        """
        body = memoryview(data).cast("B")
        parts = [memoryview(_HEADER.pack(tag, len(body))), body]
        with self._sending:
            if self.is_closed:
                raise RuntimeError(_CLOSED)
            self.num_sent += 1
            if not self._num_departing:
                parts = _after(parts, self._send_now(parts))
                if not parts:
                    return _DEPARTED
            self._num_departing += 1
            message = _Departing(parts)
            self._sender.call(self._send_rest, message)
        return message

    def receive(self, memory: memoryview | None, tag: int = 0) -> Arriving:
        """Expect the next message with a tag.

        Args:
            memory: where it goes; None if its size is not known.
        """
        message = Arriving(self, memory)
        with self._changed:
            if (early := _next(self._early, tag)) is not None:
                _deliver(message, early)
                return message
            self._expected[tag].append(message)
        if memory is not None and len(memory) >= self._large:
            message.begin()
        return message

    def begin(self, message: Arriving) -> None:
        """Have a thread read until a message has come."""
        with self._changed:
            if not message.has_come and not self.is_closed:
                self._reader.call(self._read_ahead_to, message)

    def read_up_to(self, message: Arriving, timeout: timedelta, on_pause: Callable[[], None] = _nothing) -> None:
        """Read until a message has come. The timeout is the longest in which nothing comes."""
        pauses = 0
        with self._changed:
            while not message.has_come:
                if self._error:
                    raise RuntimeError(self._error)
                if self._is_reading:
                    before = self._num_read
                    if self._changed.wait(_PAUSE.total_seconds()) or self._num_read != before:
                        pauses = 0
                        continue
                    pauses += 1
                    if pauses * _PAUSE >= timeout:
                        raise RuntimeError(_LATE)
                    self._changed.release()
                    try:
                        on_pause()
                    finally:
                        self._changed.acquire()
                    continue
                self._is_reading = True
                self._changed.release()
                try:
                    self._read(timeout, on_pause)
                finally:
                    self._changed.acquire()
                    self._is_reading = False
                    self._changed.notify_all()

    def close(self) -> None:
        """Close the connection, which wakes up the peer and whoever waits here. What the system has taken arrives,
        unless the peer has sent what was not read.
        """
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        with self._sending, self._changed:
            self.is_closed = True
            self._sender.close()
            self._reader.close()
            self._early.clear()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send_now(self, parts: list[memoryview]) -> int:
        """Give the system what it takes. Returns how many bytes that is."""
        try:
            return self._connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RuntimeError(_told(error)) from None

    def _send_rest(self, message: _Departing) -> None:
        try:
            for part in message.parts:
                self._connection.sendall(part)
        except OSError as error:
            message.error = _told(error)
        with self._sending:
            self._num_departing -= 1
        message.parts.clear()
        message.has_ended.set()

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _read(self, timeout: timedelta, on_pause: Callable[[], None]) -> None:
        """Read one message; a single thread does at a time."""
        try:
            header = memoryview(bytearray(_HEADER.size))
            self._fill(header, timeout, on_pause)
            tag, size = _HEADER.unpack(header)
            with self._changed:
                message = _next(self._expected, tag)
            if message is None or not message.is_sized:
                data = memoryview(bytearray(size))
            elif size <= len(message.data):  # all ranks exchange vectors that may be longer where they disagree
                data = message.data[:size]
            else:
                raise _too_long(size, message)
            self._fill(data, timeout, on_pause)
            with self._changed:
                message = message or _next(self._expected, tag)
                if message is None:
                    self._early[tag].append(data)
                else:
                    _deliver(message, data)
                self.num_received += 1
        except BlockingIOError:
            self._error = _LATE
            raise RuntimeError(self._error) from None
        except (OSError, RuntimeError) as error:
            self._error = _told(error)
            raise RuntimeError(self._error) from None
        except BaseException as error:  # in the middle of a message, after which nothing can be read
            self._error = f"{_CLOSED} (reading was interrupted by {type(error).__name__})"
            raise

    def _fill(self, memory: memoryview, timeout: timedelta, on_pause: Callable[[], None]) -> None:
        """Read bytes, those that were read ahead first."""
        done = 0
        while True:
            num = min(len(memory) - done, len(self._ahead))
            memory[done : done + num] = self._ahead[:num]
            self._ahead = self._ahead[num:]
            done += num
            if done == len(memory):
                return
            if len(memory) - done >= _BUFFER:
                done += self._receive(memory[done:], timeout, on_pause)
            else:
                self._ahead = self._buffer[: self._receive(self._buffer, timeout, on_pause)]

    def _receive(self, memory: memoryview, timeout: timedelta, on_pause: Callable[[], None]) -> int:
        pauses = 0
        while True:
            try:
                num = self._connection.recv_into(memory)
                break
            except BlockingIOError:
                pauses += 1
                if pauses * _PAUSE >= timeout:
                    raise
                on_pause()
        if not num:
            raise ConnectionError(_CLOSED)
        self._num_read += num
        return num

    def _read_ahead_to(self, message: Arriving) -> None:
        with contextlib.suppress(RuntimeError):  # whoever waits for it is told
            self.read_up_to(message, timedelta.max)


_open: WeakSet[Stream] = WeakSet()


def _leave_to_parent() -> None:
    """In a fork, such as a loader's worker, close what belongs to the rank: its peers then notice when it ends."""
    for stream in list(_open):
        stream._connection.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class _Background:
    """A thread that makes calls one after the other, from the first one on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Callable[[Any], None], Any] | None] | None = None

    def call(self, function: Callable[[Any], None], argument: Any) -> None:
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_make_calls, args=(self._calls,), name=self._name, daemon=True).start()
        self._calls.put((function, argument))

    def close(self) -> None:
        if self._calls is not None:
            self._calls.put(None)


def _make_calls(calls: SimpleQueue[tuple[Callable[[Any], None], Any] | None]) -> None:
    while (call := calls.get()) is not None:
        function, argument = call
        function(argument)
        del call, function, argument  # a message holds a tensor


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of parts after so many bytes."""
    left = []
    for part in parts:
        if num_bytes < len(part):
            left.append(part[num_bytes:])
        num_bytes = max(0, num_bytes - len(part))
    return left


def _next(queues: dict[int, deque[T]], tag: int) -> T | None:
    """Take the first of a tag's queue; one that is empty goes, as there may be a tag for each message."""
    queue = queues.get(tag)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first


def _deliver(message: Arriving, data: memoryview) -> None:
    """Give a message its bytes, if they are not in their place already."""
    if not message.is_sized:
        message.data = data
    elif len(data) > len(message.data):
        raise _too_long(len(data), message)
    elif data.obj is not message.data.obj:
        message.data[: len(data)] = data
    message.has_come = True


def _too_long(size: int, message: Arriving) -> RuntimeError:
    return RuntimeError(f"a message of {size:,} bytes came where {len(message.data):,} were expected")


def timeval(timeout: timedelta) -> bytes:
    return struct.pack("@ll", timeout.days * 86_400 + timeout.seconds, timeout.microseconds)


def _told(error: Exception) -> str:
    """An error of the system in the words by which a broken connection is known."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{_CLOSED} ({os.strerror(error.errno).lower()})"
    return str(error)
