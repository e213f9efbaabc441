"""Transport: tensors and small objects between the stages of one pipeline."""

from __future__ import annotations

import itertools
import pickle
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.runtime.backend_rules import backend_of, check_environment, first_uses, flat, is_dense, to_wire
from lightning_pipeline.runtime.failure import FailureNotice
from lightning_pipeline.runtime.topology import Topology

FRAME = 1024
"""Bytes of an object's first message, its length included: most need no second one."""
_LENGTH = 8  # bytes
CONTROL_WINDOW = 64  # objects to one peer that may be underway before the oldest is waited for


SEND_WINDOW = 4
"""Sends to a peer that may be underway, where it cannot be told which have finished."""


class Channel(IntEnum):
    """Streams of tensors that do not wait for one another."""

    FORWARD = 0  # activations
    BACKWARD = 1  # gradients
    BATCH = 2  # batch tensors, from stage 0
    SHARED = 3  # parameters that several stages hold, and their gradients


class Route(NamedTuple):
    """One direction of a channel between two stages."""

    channel: Channel
    source: int
    destination: int


def routes_along(placement: Sequence[int]) -> list[Route]:
    """The routes of a pipeline whose data passes these ranks, one virtual stage after another."""
    routes = set()
    for source, destination in itertools.pairwise(placement):
        if source != destination:
            routes.add(Route(Channel.FORWARD, source, destination))
            routes.add(Route(Channel.BACKWARD, destination, source))
    for rank in range(1, max(placement) + 1):
        routes.add(Route(Channel.BATCH, 0, rank))
        for other in range(rank):
            routes.add(Route(Channel.SHARED, other, rank))
            routes.add(Route(Channel.SHARED, rank, other))
    return sorted(routes)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a receiver has to know to make room for a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """The meta under which `tensor` arrives."""
        shape, stride = wire_layout(tensor)
        return cls(shape, stride, tensor.dtype)


def wire_layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides with which `tensor` arrives: its own if its memory is dense, else contiguous ones."""
    shape = tuple(tensor.shape)
    if tensor.is_contiguous() or is_dense(tensor):
        return shape, tensor.stride()
    return shape, torch.empty(shape, device="meta").stride()


class _Link:
    """One route's end on this rank. What is being sent stays alive in `underway`."""

    __slots__ = ("group", "is_gloo", "peer", "underway", "window")

    def __init__(self, group: dist.ProcessGroup, peer: int, *, is_gloo: bool, window: int | None) -> None:
        self.group: dist.ProcessGroup | None = group
        self.peer = peer
        self.is_gloo = is_gloo
        self.window = window
        self.underway: deque[tuple[dist.Work, Tensor, str]] = deque()


class PendingReceive:
    """A tensor underway."""

    __slots__ = ("_buffer", "_link", "_transport", "_work")

    def __init__(self, transport: Transport, link: _Link, work: dist.Work | None, buffer: Tensor) -> None:
        self._transport = transport
        self._link = link
        self._work = work
        self._buffer = buffer

    def wait(self, what: str) -> Tensor:
        """The tensor, once it is there. `what` names it in errors: ``"the activations of micro-batch 3 (2F3)"``.

        Raises:
            PipelineTimeoutError: nothing came within the timeout.
            PeerFailedError: this peer, or another rank before it, failed.
        """
        if self._work is not None:
            transport = self._transport
            transport._wait(self._work, self._link, what, "from")
            self._work = None
            transport._receives.discard(self)
        return self._buffer


class _StagedReceive(PendingReceive):
    """A tensor underway to host memory, for a device whose tensors the backend does not take."""

    __slots__ = ()

    def wait(self, what: str) -> Tensor:
        return super().wait(what).to(self._transport.device)


class Transport:
    """Asynchronous sends and receives between the stages of this rank's pipeline, each wait bounded by a timeout.

    Peers are stages, 0 .. num_stages - 1. Messages on one route arrive in the order they were sent. Each channel has
    one process group for each direction (`backend_rules` says why); Gloo needs fewer.

    Every rank of the world makes its transports in the same order, after ``init_process_group``.

    Args:
        topology: where this rank is.
        device: where received tensors go.
        timeout: the longest any wait may take.
        store: carries failure notices; the default group's store or a PrefixStore around it.
        notice: tells of failures; default: one of its own over `store`.
        routes: what will be used; default: those along the topology's placement. Backends that connect on first use
            connect here, as first uses in different orders would deadlock.
        send_window: forward or backward sends to one peer that may be underway before the oldest is waited for, on
            a backend that cannot tell whether a send has finished (Gloo). Bounds the memory that sends hold.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        timeout: timedelta,
        store: dist.Store | None,
        *,
        notice: FailureNotice | None = None,
        routes: Iterable[Route] | None = None,
        send_window: int = SEND_WINDOW,
    ) -> None:
        self.topology = topology
        self.store = store
        self.requested_device = device
        self.device = torch.empty(0, device=device).device  # with its index
        self.timeout = timeout
        self.stage = topology.stage_rank
        self.pipeline_ranks = topology.pipeline_ranks
        self.control_group: dist.ProcessGroup | None = None  # do not keep a reference: it would hold it open
        self._outgoing: dict[tuple[Channel, int], _Link] = {}
        self._incoming: dict[tuple[Channel, int], _Link] = {}
        self._control: dict[int, _Link] = {}
        self._receives: set[PendingReceive] = set()
        self._groups: list[dist.ProcessGroup] = []
        self._wire_device = torch.device("cpu")
        self._pending: type[PendingReceive] = PendingReceive
        self._use(notice or FailureNotice(store, rank=topology.rank, world_size=topology.world_size))
        if topology.num_stages > 1:
            along = routes_along(topology.placement or range(topology.num_stages))
            self._connect(sorted(along if routes is None else routes), send_window)

    # A process has one default group, and connections belong to it: strategies that follow one another share them.
    _shared: ClassVar[list[Transport]] = []

    @classmethod
    def shared(
        cls,
        topology: Topology,
        device: torch.device,
        timeout: timedelta,
        store: dist.Store,
        notice: FailureNotice | None = None,
    ) -> Transport:
        """The open transport of this process with these arguments, or a new one. Threads and sockets stay bounded
        however many runs a script makes."""
        cls._shared = [transport for transport in cls._shared if transport._control]
        for transport in cls._shared:
            same = (transport.topology, transport.requested_device, transport.timeout) == (topology, device, timeout)
            if same and transport.store is store:
                transport._use(notice or transport.notice)
                return transport
        cls._shared.append(cls(topology, device, timeout, store, notice=notice))
        return cls._shared[-1]

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> None:
        """Send `tensor`, which must not change until it is sent; its graph is not kept.

        Returns at once, unless a full send window makes it wait for an older send (never on ``Channel.BATCH``).
        """
        link = self._outgoing.get((channel, peer)) or self._no_route(channel, self.stage, peer)
        if tensor.numel():
            self._post(link, to_wire(tensor.detach(), self._wire_device), channel.name)

    def recv(self, meta: TensorMeta, peer: int, channel: Channel) -> PendingReceive:
        """Post the receive of the next tensor from `peer`, which has to look like `meta`."""
        link = self._incoming.get((channel, peer)) or self._no_route(channel, peer, self.stage)
        buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self._wire_device)
        if not buffer.numel():  # never travels
            return self._pending(self, link, None, buffer)
        return self._receive(link, buffer, channel.name, self._pending)

    def flush(self) -> None:
        """Wait until all that was sent has left, and let go of it. On an accelerator the current stream waits."""
        for link in (*self._outgoing.values(), *self._control.values()):
            while link.underway:
                self._finish_oldest(link)

    def send_object(self, obj: Any, peer: int) -> None:
        """Pickle `obj` and send it without waiting, in order with the other objects to `peer`."""
        self._send_bytes(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), peer)

    def recv_object(self, peer: int, what: str) -> Any:
        """The next object from `peer`. `what` names it in errors."""
        link = self._control[peer]
        frame = self._receive(link, torch.empty(FRAME, dtype=torch.uint8), what).wait(what).numpy().tobytes()
        size = int.from_bytes(frame[:_LENGTH], "little")
        payload = frame[_LENGTH : _LENGTH + size]
        if size > len(payload):
            rest = self._receive(link, torch.empty(size - len(payload), dtype=torch.uint8), what).wait(what)
            payload += rest.numpy().tobytes()
        return pickle.loads(payload)

    def broadcast_object(self, obj: Any, source: int, what: str) -> Any:
        """`obj` of the stage `source`, on every stage. What the other stages pass is ignored."""
        if self.stage != source:
            return self.recv_object(source, what)
        payload = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        for peer in self._control:
            self._send_bytes(payload, peer)
        return obj

    def all_gather_vector(self, values: Tensor, what: str) -> Tensor:
        """Every stage's `values` (float64, [n], the same n everywhere), as [num_stages, n] on the CPU."""
        # Point to point rather than a collective: an error then names the peer, and none is left running at exit.
        values = values.detach().to("cpu", torch.float64, copy=True)
        gathered = values.new_empty(len(self.pipeline_ranks), len(values))
        gathered[self.stage] = values
        pending = [self._receive(link, gathered[peer], what) for peer, link in self._control.items()]
        for link in self._control.values():
            self._post(link, values, what)
        for receive in pending:
            receive.wait(what)
        return gathered

    def barrier(self, what: str) -> None:
        """Return once every stage of this pipeline has called this."""
        self.all_gather_vector(torch.zeros(1, dtype=torch.float64), what)

    def close(self) -> None:
        """End an orderly run: flush, wait for the other stages, drop the process groups.

        After a failure call ``notice.fail`` instead; then this does nothing.
        """
        if self._control:
            self.barrier("the end of the run")
            self.flush()
        self.notice.close()
        self._disconnect()

    def _use(self, notice: FailureNotice) -> None:
        self.notice = notice
        notice.describe = self.topology.describe
        notice.tear_down = self._disconnect
        notice.interrupt = self._abort

    def _connect(self, routes: list[Route], send_window: int) -> None:
        backend = backend_of(self.device.type)
        check_environment(backend)
        is_gloo = backend == dist.Backend.GLOO
        if not is_gloo:
            self._wire_device = self.device
        elif self.device != self._wire_device:
            self._pending = _StagedReceive
        self.control_group = control = self._new_group(dist.Backend.GLOO)
        others = (stage for stage in range(self.topology.num_stages) if stage != self.stage)
        self._control = {peer: _Link(control, peer, is_gloo=True, window=CONTROL_WINDOW) for peer in others}
        groups: dict[tuple[Channel, bool], dist.ProcessGroup] = {}
        for channel, source, destination in routes:
            # What is shared goes both ways in one order on both sides, and there are many pairs that may share.
            direction = (channel, channel is Channel.SHARED or destination > source)
            if is_gloo and channel is Channel.BACKWARD:
                # The two ways between a pair do not wait for one another, and one thread for both wakes up less.
                direction = (Channel.FORWARD, source > destination)
            if direction not in groups:
                groups[direction] = self._new_group(backend)
            if self.stage == source:
                # Gloo cannot tell which sends have finished, so old ones are waited for; not those of a batch, as
                # its receivers may not ask for the last micro-batch before this stage has computed the first.
                window = send_window if is_gloo and channel is not Channel.BATCH else None
                link = _Link(groups[direction], destination, is_gloo=is_gloo, window=window)
                self._outgoing[channel, destination] = link
            elif self.stage == destination:
                self._incoming[channel, source] = _Link(groups[direction], source, is_gloo=is_gloo, window=None)
        if not is_gloo:
            self._warm_up(routes)

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        """This pipeline's ranks as a group; every rank of the world makes those of all pipelines."""
        for pipeline in range(self.topology.num_pipelines):
            group = dist.new_group(self.topology.ranks_of_pipeline(pipeline), timeout=self.timeout, backend=backend)
            if pipeline == self.topology.pipeline:
                own = group
        self._groups.append(own)
        return own

    def _warm_up(self, routes: list[Route]) -> None:
        """Use every route once, so that it is connected."""
        for channel, source, destination in first_uses(routes):
            if self.stage == source:
                self.send(torch.zeros(1, device=self.device), destination, channel)
                self.flush()
            elif self.stage == destination:
                meta = TensorMeta((1,), (1,), torch.float32)
                self.recv(meta, source, channel).wait(f"the first connection on {channel.name}")

    def _post(self, link: _Link, tensor: Tensor, name: str) -> None:
        underway = link.underway
        try:
            underway.append((link.group.send([tensor], link.peer, 0), tensor, name))  # type: ignore[union-attr]
        except RuntimeError as error:
            self._broken(error, link, f"the receipt of {name}", "by", None)
        if link.window is not None:
            if len(underway) > link.window:
                self._finish_oldest(link)
        elif not link.is_gloo:
            while underway and underway[0][0].is_completed():
                underway.popleft()

    def _finish_oldest(self, link: _Link) -> None:
        underway = link.underway  # no local for the work: in a traceback it would keep its connection open
        self._wait(underway[0][0], link, f"the receipt of an earlier send ({underway[0][2]})", "by")
        underway.popleft()

    def _send_bytes(self, payload: bytes, peer: int) -> None:
        link = self._control[peer]
        frame = len(payload).to_bytes(_LENGTH, "little") + payload[: FRAME - _LENGTH]
        self._post(link, torch.frombuffer(bytearray(frame.ljust(FRAME, b"\0")), dtype=torch.uint8), "an object")
        if rest := payload[FRAME - _LENGTH :]:
            self._post(link, torch.frombuffer(bytearray(rest), dtype=torch.uint8), "an object")

    def _receive(
        self, link: _Link, buffer: Tensor, what: str, pending: type[PendingReceive] = PendingReceive
    ) -> PendingReceive:
        try:
            work = link.group.recv([flat(buffer)], link.peer, 0)  # type: ignore[union-attr]
        except RuntimeError as error:
            self._broken(error, link, what, "from", None)
        receive = pending(self, link, work, buffer)
        self._receives.add(receive)
        return receive

    def _wait(self, work: dist.Work, link: _Link, what: str, preposition: str) -> None:
        started = time.monotonic()
        try:
            if link.is_gloo:
                work.wait(self.timeout)
            else:  # the stream waits, not this thread
                work.wait()
                if self.notice.failure is not None:
                    raise RuntimeError("aborted")
        except RuntimeError as error:
            del work  # the traceback would keep its connection open
            self._broken(error, link, what, preposition, time.monotonic() - started)

    def _broken(self, error: RuntimeError, link: _Link, what: str, preposition: str, waited: float | None) -> NoReturn:
        rank = self.pipeline_ranks[link.peer]
        limit = self.timeout.total_seconds()
        timed_out = waited is not None and waited >= 0.99 * limit
        raise self.notice.explain(
            error,
            waiting_for=f"{what} {preposition} {self.topology.describe(rank)}",
            peer=rank,
            timed_out_after=limit if timed_out else None,
        ) from None  # which quotes what is of use in it

    def _no_route(self, channel: Channel, source: int, destination: int) -> NoReturn:
        raise ValueError(
            f"no {Channel(channel).name} route from stage {source} to stage {destination}: "
            f"name it in the `routes` of the transport"
        )

    def _abort(self) -> None:
        """End operations on an accelerator that wait for a failed rank. Gloo has nothing to abort."""
        for group in list(self._groups):
            group.abort()

    def _disconnect(self) -> None:
        """Drop the process groups. Gloo closes its connections, which wakes the peers, when nothing refers to them
        any more: no work, no link, no group."""
        for receive in self._receives:
            receive._work = None
        self._receives.clear()
        for link in (*self._outgoing.values(), *self._incoming.values(), *self._control.values()):
            link.underway.clear()
            link.group = None
        self._outgoing, self._incoming, self._control = {}, {}, {}
        groups, self._groups, self.control_group = self._groups, [], None
        while groups and dist.is_initialized():
            dist.destroy_process_group(groups.pop())
