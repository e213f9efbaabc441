"""The transport between the stages of one pipeline: tensors, objects and small vectors."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Set
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import laid_out
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.partition.tree import dumps
from lightning_pipeline.runtime.backends import (
    backend_of,
    check_environment,
    first_uses,
    flat,
    own_group,
    to_wire,
    warm_up,
)
from lightning_pipeline.runtime.connecting import connect
from lightning_pipeline.runtime.endpoint import Connection, DeviceEndpoint, Endpoint, HostEndpoint, PendingReceive
from lightning_pipeline.runtime.failure import FailureNotice, waiting_for
from lightning_pipeline.runtime.log import LoggedDeviceEndpoint, LoggedHostEndpoint, is_logging
from lightning_pipeline.runtime.store import BoundedStore
from lightning_pipeline.runtime.streams import Stream
from lightning_pipeline.runtime.tensor_meta import TensorMeta, conform, wire
from lightning_pipeline.runtime.topology import Channel, Route, Topology, routes_along

SEND_WINDOW = 4
"""Forward or backward sends to one peer that may be underway before the oldest is waited for, over streams. It bounds
the memory that sends hold."""
_CONTROL_WINDOW = 64
"""Objects to one peer that may be underway."""
_CONTROL, _READS = -1, -2  # numbers of streams; those of channels follow from their direction


class ExchangeRequest(NamedTuple):
    """Tells a stage that another one exchanges tensors with all others, for a call of the user's outside of steps."""

    number: int
    call: str
    line: str
    given: Any = None

    def error(self, who: str, elsewhere: str) -> RuntimeError:
        """The error of the stage `who`, which made the request, if not all stages make the call."""
        return RuntimeError(
            f"{who} runs {self.call} ({self.line}), which takes data of another stage, and this is not run by "
            f"all of them ({elsewhere}): let every rank run the line, as without `if self.global_rank == 0` or "
            f"rank_zero_only"
        )


class ExchangeRequests(list[ExchangeRequest]):
    """Requests that are sent together."""


class Transport(Connection):
    """Asynchronous sends and receives between the stages of this rank's pipeline; no wait exceeds the timeout.

    Peers are stages, 0 .. num_stages - 1. Messages on one route arrive in the order they were sent. Where Gloo is the
    device's backend, and for objects, pairs have a stream for each channel and direction, which activations share with
    the gradients that come back for them (`streams` says why not Gloo); else there is a process group for each channel
    and direction (`backends` says why).

    Every rank of the world makes its transports in the same order, after ``init_process_group``.

    Args:
        topology: where this rank is.
        device: where received tensors go.
        timeout: the longest any wait may take.
        store: carries failure notices; the default group's store or a PrefixStore around it.
        notice: tells of failures; default: a new one over `store`.
    """

    # A process has one default group, to which connections belong: strategies that follow one another share them.
    _shared: ClassVar[list[Transport]] = []

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        timeout: timedelta,
        store: dist.Store | None,
        *,
        notice: FailureNotice | None = None,
    ) -> None:
        notice = notice or FailureNotice(store, rank=topology.rank, world_size=topology.world_size, timeout=timeout)
        super().__init__(topology, timeout, notice)
        self.stage = topology.stage_rank
        self.num_stages = topology.num_stages
        self.pipeline_ranks = topology.pipeline_ranks
        self.store = store
        self.requested_device = device
        self.device = torch.empty(0, device=device).device  # with its index
        self._outgoing: dict[tuple[Channel, int], Endpoint] = {}
        self._incoming: dict[tuple[Channel, int], Endpoint] = {}
        self._control: dict[int, HostEndpoint] = {}
        self._reads: dict[int, HostEndpoint] = {}
        self._by_rank: dict[tuple[int, int], Stream] = {}
        self._groups: list[dist.ProcessGroup] = []
        self._on_device: dist.ProcessGroup | None = None
        self._wire_device = torch.device("cpu")
        self._is_logged = is_logging()
        self._use(notice)
        if topology.num_stages > 1:
            self._connect(routes_along(topology.placement or range(topology.num_stages)))

    @classmethod
    def shared(
        cls,
        topology: Topology,
        device: torch.device,
        timeout: timedelta,
        store: dist.Store,
        notice: FailureNotice | None = None,
    ) -> Transport:
        """The open transport of this process with these arguments, or a new one.

        So threads and sockets stay bounded however many runs a script makes.
        """
        cls._shared = [transport for transport in cls._shared if transport._control]
        for transport in cls._shared:
            same = (transport.topology, transport.requested_device, transport.timeout) == (topology, device, timeout)
            if same and transport.store is store and transport._is_logged == is_logging():
                transport._use(notice or transport.notice)
                return transport
        cls._shared.append(cls(topology, device, timeout, store, notice=notice))
        return cls._shared[-1]

    def name_of(self, peer: int) -> str:
        """A rank of this pipeline and its stages, as messages write it."""
        return self.topology.describe(self.pipeline_ranks[peer])

    # -- tensors of known shape, along the schedule -------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> None:
        """Send `tensor`, which must not change until it is sent; its graph is not kept.

        Returns at once, unless a full send window makes it wait for an older send (never on ``Channel.BATCH``).
        """
        if tensor.numel():
            self._outgoing[channel, peer].send(to_wire(tensor.detach(), self._wire_device))

    def recv(self, meta: TensorMeta, peer: int, channel: Channel) -> PendingReceive:
        """Post the receive of the next tensor from `peer`, which must have this meta."""
        endpoint = self._incoming[channel, peer]
        buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self._wire_device)
        if buffer.numel():
            receive = endpoint.receive(buffer, endpoint.name)
        else:  # is not sent
            receive = PendingReceive(self, endpoint, None, buffer)
        if self._wire_device != self.device:
            receive.device = self.device
        return receive

    # -- objects, and tensors in order with them ----------------------------------------------------------------------

    def send_object(self, obj: Any, peer: int) -> None:
        """Pickle `obj` and send it without waiting, in order with the other objects to `peer`."""
        self._control[peer].send_bytes(dumps(obj))

    def recv_object(self, peer: int, what: str, *, takes_requests: bool = False) -> Any:
        """The next object from `peer`. `what` names it in errors."""
        found = pickle.loads(self._control[peer].receive_bytes(what))
        if type(found) is ExchangeRequests and not takes_requests:
            raise found[0].error(self.name_of(peer), f"{self.name_of(self.stage)} waits for {what}")
        return found

    def broadcast_object(self, obj: Any, source: int, what: str) -> Any:
        """`obj` of the stage `source`, on every stage. What the other stages pass is ignored."""
        if self.stage != source:
            return self.recv_object(source, what)
        payload = dumps(obj)
        for endpoint in self._control.values():
            endpoint.send_bytes(payload)
        return obj

    def send_on_control(self, tensor: Tensor, peer: int, *, waits: bool = False) -> None:
        """Send a dense tensor on the CPU, in order with objects; `waits` until it has left, so that it may be freed."""
        self._control[peer].send(flat(tensor))
        if waits:
            self._control[peer].flush()

    def receive_on_control(self, buffer: Tensor, peer: int, what: str) -> Tensor:
        """Receive into a dense tensor on the CPU, in order with objects."""
        return self._control[peer].receive(buffer, what).wait(what)

    # -- between all stages -------------------------------------------------------------------------------------------

    def all_gather_vector(self, values: Tensor, what: str, *, room: int = 0) -> Tensor:
        """Every stage's `values` (float64, [n], the same n everywhere), as [num_stages, n] on the CPU.

        Args:
            room: by how much the vector of a stage may be longer that is at another exchange, which it ought not to be.
        """
        # Point to point rather than a collective: an error then names the peer, and none is left running at exit.
        values = values.detach().to("cpu", torch.float64, copy=True)
        gathered = values.new_zeros(self.num_stages, len(values) + room)
        gathered[self.stage, : len(values)] = values
        pending = [endpoint.receive(gathered[peer], what) for peer, endpoint in self._control.items()]
        for endpoint in self._control.values():
            endpoint.send(values)
        for receive in pending:
            receive.wait(what)
        return gathered[:, : len(values)]

    def barrier(self, what: str) -> None:
        """Return once every stage of this pipeline has called this."""
        self.all_gather_vector(torch.zeros(1, dtype=torch.float64), what)

    def send_read(self, message: Tensor, number: int) -> None:
        """Send every other stage what a step reads, as a contiguous tensor on the CPU. Never waits."""
        for endpoint in self._reads.values():
            endpoint.send(message, 1 + number)

    def receive_read(self, size: int, number: int, peer: int, what: str) -> PendingReceive:
        """Post the receive of what `peer` sends by `send_read` with this number; numbers may come in any order."""
        return self._reads[peer].receive(torch.empty(size, dtype=torch.uint8), what, 1 + number)

    # -- between all stages, on their devices: no host waits, not even for what is computed before ---------------------

    @property
    def can_share_on_device(self) -> bool:
        """Whether the backend carries tensors of the device between all stages at once. Gloo does not."""
        return self._on_device is not None

    def all_gather_on_device(self, values: Tensor, what: str) -> Tensor:
        """Every stage's `values` ([n], the same n everywhere), as [num_stages, n]."""
        gathered = values.new_empty(self.num_stages * len(values))
        with waiting_for(what):
            dist.all_gather_into_tensor(flat(gathered), flat(values), self._on_device)
        return gathered.view(self.num_stages, len(values))

    def spread_on_device(self, tensor: Tensor | None, spec: TensorSpec, owner: int) -> Tensor:
        """Give every stage the tensor of its owner, a value of the step; the others pass None. It is strided."""
        meta = wire(spec)
        if tensor is None:
            buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self.device)
        else:
            buffer = conform(tensor.detach(), spec)
        with waiting_for("a value of the step"):
            dist.broadcast(flat(buffer), group=self._on_device, group_src=owner)
        return laid_out(buffer, spec.stride) if tensor is None else tensor

    # -- beginning and end --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all that was sent has left, and let go of it. On an accelerator the current stream waits."""
        for endpoint in (*self._outgoing.values(), *self._control.values(), *self._reads.values()):
            endpoint.flush()

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
        if notice is not self.notice:
            notice.waits.add(self._by_rank)
        self.notice = notice
        notice.describe = self.topology.describe
        notice.tear_down = self._disconnect
        notice.interrupt = self._abort

    def _connect(self, routes: list[Route]) -> None:
        backend = backend_of(self.device.type)
        check_environment(backend)
        is_on_host = backend == dist.Backend.GLOO
        others = [peer for peer in range(self.num_stages) if peer != self.stage]
        wanted = {(peer, number) for peer in others for number in (_CONTROL, _READS)}
        if is_on_host:
            wanted |= {(route.peer_of(self.stage), _number(route)) for route in routes if self.stage in route[1:]}
        streams = self._streams(wanted)
        on_host = LoggedHostEndpoint if self._is_logged else HostEndpoint
        on_device = LoggedDeviceEndpoint if self._is_logged else DeviceEndpoint
        for peer in others:
            self._control[peer] = on_host(self, streams[peer, _CONTROL], peer, "a message", window=_CONTROL_WINDOW)
            self._reads[peer] = on_host(self, streams[peer, _READS], peer, "what a step reads")
        groups: dict[tuple[Channel, bool], dist.ProcessGroup] = {}
        for route in routes:
            # Also of other ranks' routes, as all of them make all groups.
            direction = (route.channel, route.channel is Channel.SHARED or route.destination > route.source)
            if not is_on_host and direction not in groups:
                groups[direction] = self._new_group(backend)
            if self.stage not in route[1:]:
                continue
            peer = route.peer_of(self.stage)
            if is_on_host:
                # A batch is not waited for, as its receivers may not ask for the last micro-batch before this stage has
                # computed the first.
                window = SEND_WINDOW if route.channel is not Channel.BATCH else None
                stream = streams[peer, _number(route)]
                end: Endpoint = on_host(self, stream, peer, route.channel.name, window=window)
            else:
                end = on_device(self, groups[direction], peer, route.channel.name)
            (self._outgoing if self.stage == route.source else self._incoming)[route.channel, peer] = end
        if not is_on_host:  # such backends connect on first use, where different orders would deadlock
            self._wire_device = self.device
            self._warm_up(routes)
            self._on_device = self._new_group(backend)
            warm_up(self._on_device)

    def _streams(self, wanted: Set[tuple[int, int]]) -> dict[tuple[int, int], Stream]:
        """Streams to other stages, by (peer, number)."""
        places = {rank: stage for stage, rank in enumerate(self.pipeline_ranks)}
        store = BoundedStore(_torch.default_store(), rank=self.topology.rank, limit=self.timeout)
        by_rank = {(self.pipeline_ranks[peer], number) for peer, number in wanted}
        raise_failure = partial(self.notice.raise_failure, "all ranks to connect")
        found = connect(store, self.topology.rank, by_rank, self.timeout, raise_failure)
        self._by_rank = found
        self.notice.waits.add(found)
        return {(places[rank], number): stream for (rank, number), stream in found.items()}

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        """The group of this pipeline's ranks."""
        pipelines = map(self.topology.ranks_of_pipeline, range(self.topology.num_pipelines))
        own = own_group(pipelines, self.topology.rank, self.timeout, backend)
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

    def _abort(self) -> None:
        """End operations on an accelerator that wait for a failed rank."""
        for group in list(self._groups):
            group.abort()

    def _disconnect(self) -> None:
        """Close all connections, which wakes the peers.

        A process group closes its own once nothing refers to them: no work, endpoint or group.
        """
        for receive in self.receives:
            receive.abandon()
        self.receives.clear()
        ends = (self._outgoing, self._incoming, self._control, self._reads)
        for endpoint in itertools.chain.from_iterable(end.values() for end in ends):
            endpoint.close()
        self._outgoing, self._incoming, self._control, self._reads = {}, {}, {}, {}
        groups, self._groups, self._on_device = self._groups, [], None
        while groups and dist.is_initialized():
            dist.destroy_process_group(groups.pop())


def _number(route: Route) -> int:
    """The number of a route's stream between its two stages.

    Activations and the gradients that come back for them share one.
    """
    is_up = route.destination > route.source
    if route.channel is Channel.BACKWARD:
        return 2 * Channel.FORWARD + (not is_up)
    return 2 * route.channel + (is_up or route.channel is Channel.SHARED)
