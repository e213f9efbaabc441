"""One end of a route between two ranks, and what is being sent and received on it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.runtime.backends import flat
from lightning_pipeline.runtime.failure import FailureNotice
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

    def raise_broken(self, error: RuntimeError, peer: int, what: str, waited: float | None) -> NoReturn:
        """Raise what `error` means, which came up while sending to or receiving from the stage `peer`.

        Args:
            what: what was waited for, with a preposition: ``"the activations of micro-batch 3 from"``.
            waited: seconds since the wait began; None if the operation could not even be posted.
        """
        rank = self.topology.pipeline_ranks[peer]
        limit = self.timeout.total_seconds()
        timed_out = waited is not None and waited >= 0.99 * limit
        raise self.notice.explain(
            error,
            waiting_for=f"{what} {self.topology.describe(rank)}",
            peer=rank,
            timed_out_after=limit if timed_out else None,
        ) from None  # the explanation quotes what is useful of the error


class Endpoint:
    """One end of a route, on this rank.

    Args:
        group: the route's process group.
        peer: the stage at the other end.
        name: what errors call what is sent.
        window: how many sends may be underway before the oldest is waited for; None for no bound.

    Attributes:
        underway: sends that may not have finished, with their tensors, which have to stay alive until then.
    """

    __slots__ = ("_connection", "group", "is_gloo", "name", "peer", "underway", "window")

    def __init__(
        self,
        connection: Connection,
        group: dist.ProcessGroup,
        peer: int,
        name: str,
        *,
        is_gloo: bool,
        window: int | None,
    ) -> None:
        # Gloo's own send and recv, rather than the group's: these go through torch's dispatcher, which takes a third of
        # the time of posting a small message.
        self.group: Any = _torch.group_backend(group, torch.device("cpu")) if is_gloo else group
        self.peer = peer
        self.name = name
        self.is_gloo = is_gloo
        self.window = window
        self.underway: deque[tuple[dist.Work, Tensor]] = deque()
        self._connection = connection

    def send(self, tensor: Tensor, tag: int = 0) -> None:
        """Send a contiguous tensor to a receive with the same tag. Returns at once, unless the window is full."""
        underway = self.underway
        try:
            underway.append((self._post(self.group.send, tensor, tag), tensor))
        except RuntimeError as error:
            self._connection.raise_broken(error, self.peer, f"the receipt of {self.name} by", None)
        if self.window is not None:
            if len(underway) > self.window:
                self.finish_oldest()
        elif not self.is_gloo:  # Gloo does not tell
            while underway and underway[0][0].is_completed():
                underway.popleft()

    def receive(self, buffer: Tensor, what: str, tag: int = 0) -> PendingReceive:
        """Post the receive of the next message with a tag into `buffer`, a dense tensor."""
        try:
            work = self._post(self.group.recv, flat(buffer), tag)
        except RuntimeError as error:
            self._connection.raise_broken(error, self.peer, f"{what} from", None)
        receive = PendingReceive(self._connection, self, work, buffer)
        self._connection.receives.add(receive)
        return receive

    def _post(self, operation: Callable[..., dist.Work], tensor: Tensor, tag: int) -> dist.Work:
        """Begin a send or receive.

        Gloo's are kept out of profiles: it would write their ends into the profile when they come, and by then the
        profile and its memory may be gone.
        """
        if not self.is_gloo or not _torch.is_profiling():
            return operation([tensor], self.peer, tag)
        _torch.record_functions(False)
        try:
            return operation([tensor], self.peer, tag)
        finally:
            _torch.record_functions(True)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self.underway:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Wait until the oldest send has left."""
        underway = self.underway  # no local for the work: a traceback would keep it, and its connection open
        self.wait(underway[0][0], f"the receipt of an earlier send ({self.name}) by")
        underway.popleft()

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for `work`, on an accelerator by the current stream. `what` is as in `Connection.raise_broken`."""
        connection = self._connection
        started = time.monotonic()
        try:
            if self.is_gloo:
                work.wait(connection.timeout)
            else:
                work.wait()
                if connection.notice.failure is not None:  # which has aborted the work
                    raise RuntimeError("aborted")
        except RuntimeError as error:
            del work  # a traceback would keep it, and its connection open
            connection.raise_broken(error, self.peer, what, time.monotonic() - started)

    def close(self) -> None:
        """Let go of the connection and of what is underway on it."""
        self.underway.clear()
        self.group = None


class PendingReceive:
    """A tensor that is being received.

    Attributes:
        device: where it goes when it has come, if its buffer is not there.
    """

    __slots__ = ("_buffer", "_connection", "_endpoint", "_work", "device")

    def __init__(self, connection: Connection, endpoint: Endpoint, work: dist.Work | None, buffer: Tensor) -> None:
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

    def abandon(self) -> None:
        """Let go of the connection; nobody will wait."""
        self._work = None
