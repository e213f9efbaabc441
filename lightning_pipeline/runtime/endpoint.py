"""One end of a route between two ranks: what is under way on it, and objects sent over it."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.partition.tree import dumps
from lightning_pipeline.runtime.backends import flat
from lightning_pipeline.runtime.failure import FailureNotice
from lightning_pipeline.runtime.topology import Topology


class Connection:
    """What the ends of all routes of a rank have in common.

    Attributes:
        notice: tells of failures.
        receives: those that are underway.
    """

    def __init__(self, topology: Topology, timeout: timedelta, notice: FailureNotice) -> None:
        self.notice = notice
        self.receives: set[PendingReceive] = set()
        self.timeout = timeout
        self._topology = topology

    def broken(self, error: RuntimeError, peer: int, what: str, preposition: str, waited: float | None) -> NoReturn:
        """Raise what there is to say of an `error` in dealing with the stage `peer`, after so many seconds' wait."""
        rank = self._topology.pipeline_ranks[peer]
        limit = self.timeout.total_seconds()
        timed_out = waited is not None and waited >= 0.99 * limit
        raise self.notice.explain(
            error,
            waiting_for=f"{what} {preposition} {self._topology.describe(rank)}",
            peer=rank,
            timed_out_after=limit if timed_out else None,
        ) from None  # which quotes what is of use in it


class Endpoint:
    """One route's end on this rank. What is being sent stays alive in `underway`.

    Args:
        group: the route's process group.
        peer: the stage at the other end.
        name: what errors call what is sent.
        window: how many sends may be underway before the oldest is waited for; None for no bound.
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
        # Gloo's own send and receive rather than the group's, which go through the dispatcher of torch's operators:
        # that takes a third of the time that posting a small message does.
        self.group: Any = group._get_backend(torch.device("cpu")) if is_gloo else group
        self.peer = peer
        self.name = name
        self.is_gloo = is_gloo
        self.window = window
        self.underway: deque[tuple[dist.Work, Tensor]] = deque()
        self._connection = connection

    def send(self, tensor: Tensor, tag: int = 0) -> None:
        """Send a contiguous tensor, to a receive with the same tag. Returns at once, unless the window is full."""
        underway = self.underway
        try:
            underway.append((self._post(self.group.send, tensor, tag), tensor))
        except RuntimeError as error:
            self._connection.broken(error, self.peer, f"the receipt of {self.name}", "by", None)
        if self.window is not None:
            if len(underway) > self.window:
                self.finish_oldest()
        elif not self.is_gloo:
            while underway and underway[0][0].is_completed():
                underway.popleft()

    def receive(self, buffer: Tensor, what: str, tag: int = 0) -> PendingReceive:
        """Post the receive of the next message with a tag into `buffer`, a dense tensor."""
        try:
            work = self._post(self.group.recv, flat(buffer), tag)
        except RuntimeError as error:
            self._connection.broken(error, self.peer, what, "from", None)
        receive = PendingReceive(self._connection, self, work, buffer)
        self._connection.receives.add(receive)
        return receive

    def _post(self, operation: Callable[..., dist.Work], tensor: Tensor, tag: int) -> dist.Work:
        """Begin a send or receive. Gloo's stay out of profiles: it writes down their ends when they come, and the
        profile, with the memory for that, may be gone by then."""
        if not self.is_gloo or not torch.autograd._profiler_enabled():
            return operation([tensor], self.peer, tag)
        torch.autograd._enable_record_function(False)
        try:
            return operation([tensor], self.peer, tag)
        finally:
            torch.autograd._enable_record_function(True)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self.underway:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Wait until the oldest message that is underway has left."""
        underway = self.underway  # no local for the work: in a traceback it would keep its connection open
        self.wait(underway[0][0], f"the receipt of an earlier send ({self.name})", "by")
        underway.popleft()

    def wait(self, work: dist.Work, what: str, preposition: str) -> None:
        """Wait for `work`; on an accelerator the current stream waits."""
        connection = self._connection
        started = time.monotonic()
        try:
            if self.is_gloo:
                work.wait(connection.timeout)
            else:  # the stream waits, not this thread
                work.wait()
                if connection.notice.failure is not None:
                    raise RuntimeError("aborted")
        except RuntimeError as error:
            del work  # the traceback would keep its connection open
            connection.broken(error, self.peer, what, preposition, time.monotonic() - started)

    def close(self) -> None:
        """Let go of the connection and all that is underway on it."""
        self.underway.clear()
        self.group = None


class PendingReceive:
    """A tensor underway."""

    __slots__ = ("_buffer", "_connection", "_endpoint", "_work")

    def __init__(self, connection: Connection, endpoint: Endpoint, work: dist.Work | None, buffer: Tensor) -> None:
        self._connection = connection
        self._endpoint = endpoint
        self._work = work
        self._buffer = buffer

    def wait(self, what: str) -> Tensor:
        """The tensor, once it is there. `what` names it in errors: ``"the activations of micro-batch 3 (2F3)"``.

        Raises:
            PipelineTimeoutError: nothing came within the timeout.
            PeerFailedError: this peer, or another rank before it, failed.
        """
        if self._work is not None:
            self._endpoint.wait(self._work, what, "from")
            self._work = None
            self._connection.receives.discard(self)
        return self._buffer

    def abandon(self) -> None:
        """Let go of the connection; nobody will wait."""
        self._work = None


class StagedReceive:
    """A tensor underway to host memory, for a device whose tensors the backend does not take."""

    __slots__ = ("_device", "_receive")

    def __init__(self, receive: PendingReceive, device: torch.device) -> None:
        self._receive = receive
        self._device = device

    def wait(self, what: str) -> Tensor:
        """The tensor on the device, once it is there; else as `PendingReceive.wait`."""
        return self._receive.wait(what).to(self._device)


FRAME = 1024
"""Bytes of an object's first message, its length included: most need no second one."""
_LENGTH = 8  # bytes
CONTROL_WINDOW = 64  # objects to one peer that may be underway before the oldest is waited for


class ExchangeRequest(NamedTuple):
    """A stage is about to exchange tensors with all others, for a call of the user's outside of steps."""

    number: int
    call: str
    line: str
    given: Any = None

    def of(self, stage: int, elsewhere: str) -> str:
        return (
            f"stage {stage} runs {self.call} ({self.line}), which takes data of another stage, and this is not run by "
            f"all of them ({elsewhere}): let every rank run the line, as without `if self.global_rank == 0` or "
            f"rank_zero_only"
        )


class ExchangeRequests(list[ExchangeRequest]):
    """What a stage gives to another one, for each call."""


class Messages:
    """What the stages of a pipeline tell one another beside tensors.

    Args:
        stage: this stage, of `num_stages`.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage = stage
        self.num_stages = num_stages
        self._control: dict[int, Endpoint] = {}
        self._reads: dict[int, Endpoint] = {}

    def send_object(self, obj: Any, peer: int) -> None:
        """Pickle `obj` and send it without waiting, in order with the other objects to `peer`."""
        self._send_bytes(dumps(obj), peer)

    def recv_object(self, peer: int, what: str) -> Any:
        """The next object from `peer`. `what` names it in errors."""
        endpoint = self._control[peer]
        frame = endpoint.receive(torch.empty(FRAME, dtype=torch.uint8), what).wait(what).numpy().tobytes()
        size = int.from_bytes(frame[:_LENGTH], "little")
        payload = frame[_LENGTH : _LENGTH + size]
        if size > len(payload):
            rest = endpoint.receive(torch.empty(size - len(payload), dtype=torch.uint8), what).wait(what)
            payload += rest.numpy().tobytes()
        found = pickle.loads(payload)
        if type(found) is ExchangeRequests and what != ExchangeRequests.__name__:
            raise RuntimeError(found[0].of(peer, f"stage {self.stage} waits for {what}"))
        return found

    def broadcast_object(self, obj: Any, source: int, what: str) -> Any:
        """`obj` of the stage `source`, on every stage. What the other stages pass is ignored."""
        if self.stage != source:
            return self.recv_object(source, what)
        payload = dumps(obj)
        for peer in self._control:
            self._send_bytes(payload, peer)
        return obj

    def all_gather_vector(self, values: Tensor, what: str) -> Tensor:
        """Every stage's `values` (float64, [n], the same n everywhere), as [num_stages, n] on the CPU."""
        # Point to point rather than a collective: an error then names the peer, and none is left running at exit.
        values = values.detach().to("cpu", torch.float64, copy=True)
        gathered = values.new_empty(self.num_stages, len(values))
        gathered[self.stage] = values
        pending = [endpoint.receive(gathered[peer], what) for peer, endpoint in self._control.items()]
        for endpoint in self._control.values():
            endpoint.send(values)
        for receive in pending:
            receive.wait(what)
        return gathered

    def send_on_control(self, tensor: Tensor, peer: int) -> None:
        """Send a dense tensor in host memory, in order with objects."""
        self._control[peer].send(flat(tensor))

    def receive_on_control(self, buffer: Tensor, peer: int, what: str) -> Tensor:
        """Receive into a dense tensor in host memory."""
        return self._control[peer].receive(buffer, what).wait(what)

    def send_read(self, message: Tensor, number: int) -> None:
        """Give every other stage what a step reads, as a contiguous tensor in host memory. Never waits."""
        for endpoint in self._reads.values():
            endpoint.send(message, 1 + number)

    def receive_read(self, size: int, number: int, peer: int, what: str) -> PendingReceive:
        """Post the receive of the next such message with this number from `peer`, in any order."""
        return self._reads[peer].receive(torch.empty(size, dtype=torch.uint8), what, 1 + number)

    def barrier(self, what: str) -> None:
        """Return once every stage of this pipeline has called this."""
        self.all_gather_vector(torch.zeros(1, dtype=torch.float64), what)

    def _send_bytes(self, payload: bytes, peer: int) -> None:
        endpoint = self._control[peer]
        frame = len(payload).to_bytes(_LENGTH, "little") + payload[: FRAME - _LENGTH]
        endpoint.send(torch.frombuffer(bytearray(frame.ljust(FRAME, b"\0")), dtype=torch.uint8))
        if rest := payload[FRAME - _LENGTH :]:
            endpoint.send(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
