"""One end of a route between two ranks, and what is being sent and received on it."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.runtime.backends import flat
from lightning_pipeline.runtime.errors import PipelineDeadlockError, is_late
from lightning_pipeline.runtime.failure import FailureNotice
from lightning_pipeline.runtime.streams import Arriving, Message, Stream
from lightning_pipeline.runtime.topology import Topology


class Connection:
    """What all endpoints of a rank share: its transport, as they see it.

    Attributes:
        timeout: the longest any wait may take, from now on.
        notice: tells of failures.
        receives: those that nobody has waited for yet.
    """

    def __init__(self, topology: Topology, timeout: timedelta, notice: FailureNotice) -> None:
        self.topology = topology
        self.timeout = timeout
        self.notice = notice
        self.receives: set[PendingReceive] = set()

    def look_around(self) -> None:
        """What a rank does that waits for long.

        Raises:
            RuntimeError: nothing can come any more.
        """
        self.begin_receives()
        if self.notice.waits.message:
            raise RuntimeError(self.notice.waits.message)

    def begin_receives(self) -> None:
        """Have all that is expected read, as peers may wait for it to leave."""
        for receive in self.receives:
            receive.begin()

    def raise_broken(self, error: RuntimeError, peer: int, what: str, waited: float | None) -> NoReturn:
        """Raise what `error` means, which came up while sending to or receiving from the stage `peer`.

        Args:
            what: what was waited for, with a preposition: ``"the activations of micro-batch 3 from"``.
            waited: seconds since the wait began; None if the operation could not even be posted.
        """
        if self.notice.waits.message:
            raise PipelineDeadlockError(self.notice.waits.message) from None
        rank = self.topology.pipeline_ranks[peer]
        limit = self.timeout.total_seconds()
        timed_out = waited is not None and (waited >= 0.99 * limit or is_late(error))
        raise self.notice.explain(
            error,
            waiting_for=f"{what} {self.topology.describe(rank)}",
            peer=rank,
            timed_out_after=limit if timed_out else None,
        ) from None  # the explanation quotes what is useful of the error


class Endpoint:
    """One end of a route, on this rank.

    Args:
        peer: the stage at the other end.
        name: what errors call what is sent.
        window: how many sends may be underway before the oldest is waited for; None for no bound.

    Attributes:
        underway: sends that may not have finished, with their tensors, which have to stay alive until then.
    """

    __slots__ = ("_connection", "name", "peer", "underway", "window")

    def __init__(self, connection: Connection, peer: int, name: str, *, window: int | None) -> None:
        self.peer = peer
        self.name = name
        self.window = window
        self.underway: deque[tuple[Message | dist.Work, Tensor | bytes]] = deque()
        self._connection = connection

    def send(self, tensor: Tensor, tag: int = 0) -> None:
        """Send a contiguous tensor to a receive with the same tag. Returns at once, unless the window is full."""
        try:
            work = self._send(tensor, tag)
        except RuntimeError as error:
            self._connection.raise_broken(error, self.peer, f"the receipt of {self.name} by", None)
        self._note(work, tensor)

    def receive(self, buffer: Tensor, what: str, tag: int = 0) -> PendingReceive:
        """Post the receive of the next message with a tag into `buffer`, a dense tensor."""
        try:
            work = self._receive(flat(buffer), tag)
        except RuntimeError as error:
            self._connection.raise_broken(error, self.peer, f"{what} from", None)
        receive = PendingReceive(self._connection, self, work, buffer)
        self._connection.receives.add(receive)
        return receive

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self.underway:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Wait until the oldest send has left."""
        underway = self.underway  # no local for the work: a traceback would keep it, and its connection open
        self.wait(underway[0][0], f"the receipt of an earlier send ({self.name}) by")
        underway.popleft()

    def wait(self, work: Any, what: str) -> None:
        """Wait for `work`, on an accelerator by the current stream. `what` is as in `Connection.raise_broken`."""
        started = time.monotonic()
        try:
            self._wait(work)
        except RuntimeError as error:
            del work  # a traceback would keep it, and its connection open
            self._connection.raise_broken(error, self.peer, what, time.monotonic() - started)

    def close(self) -> None:
        """Let go of the connection and of what is underway on it."""
        self.underway.clear()

    def _note(self, work: Message | dist.Work, data: Tensor | bytes) -> None:
        """Keep what is being sent until it has left."""
        underway = self.underway
        if not underway and work.is_completed():
            return
        underway.append((work, data))
        while underway and underway[0][0].is_completed():
            underway.popleft()
        if self.window is not None and len(underway) > self.window:
            self.finish_oldest()

    def _send(self, tensor: Tensor, tag: int) -> Message | dist.Work:
        raise NotImplementedError

    def _receive(self, buffer: Tensor, tag: int) -> Message | dist.Work:
        raise NotImplementedError

    def _wait(self, work: Any) -> None:
        raise NotImplementedError


class HostEndpoint(Endpoint):
    """Carries tensors on the CPU and bytes, over a stream."""

    __slots__ = ("_stream",)

    def __init__(
        self, connection: Connection, stream: Stream, peer: int, name: str, *, window: int | None = None
    ) -> None:
        super().__init__(connection, peer, name, window=window)
        self._stream = stream

    def send_bytes(self, data: bytes) -> None:
        """Send bytes in order with tensors. Returns at once, unless the window is full."""
        try:
            message = self._stream.send(data)
        except RuntimeError as error:
            self._connection.raise_broken(error, self.peer, f"the receipt of {self.name} by", None)
        self._note(message, data)

    def receive_bytes(self, what: str) -> memoryview:
        """The next bytes, of any number."""
        message = self._stream.receive(None)
        self.wait(message, f"{what} from")
        return message.data

    def wait(self, work: Message, what: str) -> None:
        if type(work) is not Arriving:
            super().wait(work, what)
        elif not work.has_come:
            connection = self._connection
            rank = connection.topology.pipeline_ranks[self.peer]
            with connection.notice.waits.for_message(what, rank, self._stream.route):
                super().wait(work, what)

    def finish_oldest(self) -> None:
        self._connection.begin_receives()
        super().finish_oldest()

    def close(self) -> None:
        super().close()
        self._stream.close()

    def _send(self, tensor: Tensor, tag: int) -> Message:
        return self._stream.send(view_of(tensor), tag)

    def _receive(self, buffer: Tensor, tag: int) -> Message:
        return self._stream.receive(view_of(buffer), tag)

    def _wait(self, work: Message) -> None:
        work.wait(self._connection.timeout, self._connection.look_around)


class DeviceEndpoint(Endpoint):
    """Carries tensors on the device, by the backend of a process group."""

    __slots__ = ("_group",)

    def __init__(self, connection: Connection, group: dist.ProcessGroup, peer: int, name: str) -> None:
        super().__init__(connection, peer, name, window=None)
        self._group: Any = group

    def close(self) -> None:
        super().close()
        self._group = None

    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        return self._group.send([tensor], self.peer, tag)

    def _receive(self, buffer: Tensor, tag: int) -> dist.Work:
        return self._group.recv([buffer], self.peer, tag)

    def _wait(self, work: dist.Work) -> None:
        work.wait()
        if self._connection.notice.failure is not None:  # which has aborted the work
            raise RuntimeError("aborted")


def view_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which is kept for as long as the view of it.

    Not by NumPy, after which a tensor can never be resized.
    """
    array: Any = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


class PendingReceive:
    """A tensor that is being received.

    Attributes:
        device: where it goes when it has come, if its buffer is not there.
    """

    __slots__ = ("_buffer", "_connection", "_endpoint", "_work", "device")

    def __init__(
        self, connection: Connection, endpoint: Endpoint, work: Message | dist.Work | None, buffer: Tensor
    ) -> None:
        self._connection = connection
        self._endpoint = endpoint
        self._work = work
        self._buffer = buffer
        self.device: torch.device | None = None

    def wait(self, what: str) -> Tensor:
        """Wait for the tensor. `what` names it in errors: ``"the activations of micro-batch 3 (2F3)"``.

        Raises:
            PipelineTimeoutError: nothing came within the timeout.
            PeerFailedError: this peer, or another rank before it, failed.
        """
        if self._work is not None:
            self._endpoint.wait(self._work, f"{what} from")
            self._work = None
            self._connection.receives.discard(self)
        return self._buffer if self.device is None else self._buffer.to(self.device)

    def begin(self) -> None:
        """Have it read by a thread, if it comes over a stream."""
        if isinstance(self._work, Arriving):
            self._work.begin()

    def abandon(self) -> None:
        """Let go of the connection; nobody will wait."""
        self._work = None
