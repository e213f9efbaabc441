"""Transport: tensors, objects and small vectors between the stages of one pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import timedelta
from typing import ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.runtime.backends import backend_of, check_environment, first_uses, to_wire
from lightning_pipeline.runtime.endpoint import (
    CONTROL_WINDOW,
    Connection,
    Endpoint,
    Messages,
    PendingReceive,
    StagedReceive,
)
from lightning_pipeline.runtime.failure import FailureNotice
from lightning_pipeline.runtime.groups import new_group
from lightning_pipeline.runtime.log import LoggedEndpoint, is_logging
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.topology import Channel, Route, Topology, routes_along

SEND_WINDOW = 4
"""Sends to a peer that may be underway, where it cannot be told which have finished."""


class Transport(Messages):
    """Asynchronous sends and receives between the stages of this rank's pipeline, each wait bounded by a timeout.

    Peers are stages, 0 .. num_stages - 1. Messages on one route arrive in the order they were sent. Each channel has
    one process group for each direction (`backends` says why); Gloo needs fewer.

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
        super().__init__(topology.stage_rank, topology.num_stages)
        self.topology = topology
        self.store = store
        self.requested_device = device
        self.device = torch.empty(0, device=device).device  # with its index
        self.pipeline_ranks = topology.pipeline_ranks
        self.control_group: dist.ProcessGroup | None = None  # do not keep a reference: it would hold it open
        self._outgoing: dict[tuple[Channel, int], Endpoint] = {}
        self._incoming: dict[tuple[Channel, int], Endpoint] = {}
        self._groups: list[dist.ProcessGroup] = []
        self._wire_device = torch.device("cpu")
        self._staged = False
        self._is_logged = is_logging()
        notice = notice or FailureNotice(store, rank=topology.rank, world_size=topology.world_size, timeout=timeout)
        self._connection = Connection(topology, timeout, notice)
        self._receives = self._connection.receives
        self._use(notice)
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
            if same and transport.store is store and transport._is_logged == is_logging():
                transport._use(notice or transport.notice)
                return transport
        cls._shared.append(cls(topology, device, timeout, store, notice=notice))
        return cls._shared[-1]

    @property
    def timeout(self) -> timedelta:
        """The longest any wait may take, from now on."""
        return self._connection.timeout

    @timeout.setter
    def timeout(self, timeout: timedelta) -> None:
        self._connection.timeout = timeout

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> None:
        """Send `tensor`, which must not change until it is sent; its graph is not kept.

        Returns at once, unless a full send window makes it wait for an older send (never on ``Channel.BATCH``).
        """
        endpoint = self._outgoing.get((channel, peer)) or _no_route(channel, self.stage, peer)
        if tensor.numel():
            endpoint.send(to_wire(tensor.detach(), self._wire_device))

    def recv(self, meta: TensorMeta, peer: int, channel: Channel) -> PendingReceive | StagedReceive:
        """Post the receive of the next tensor from `peer`, which has to look like `meta`."""
        endpoint = self._incoming.get((channel, peer)) or _no_route(channel, peer, self.stage)
        buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self._wire_device)
        if buffer.numel():
            receive = endpoint.receive(buffer, endpoint.name)
        else:  # never travels
            receive = PendingReceive(self._connection, endpoint, None, buffer)
        return StagedReceive(receive, self.device) if self._staged else receive

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
        self.notice = self._connection.notice = notice
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
            self._staged = True
        self.control_group = control = self._new_group(dist.Backend.GLOO)
        others = (stage for stage in range(self.topology.num_stages) if stage != self.stage)
        for peer in others:
            self._control[peer] = self._end(control, peer, "a message", is_gloo=True, window=CONTROL_WINDOW)
            self._reads[peer] = self._end(control, peer, "what a step reads", is_gloo=True, window=None)
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
                end = self._end(groups[direction], destination, channel.name, is_gloo=is_gloo, window=window)
                self._outgoing[channel, destination] = end
            elif self.stage == destination:
                end = self._end(groups[direction], source, channel.name, is_gloo=is_gloo, window=None)
                self._incoming[channel, source] = end
        if not is_gloo:
            self._warm_up(routes)

    def _end(self, group: dist.ProcessGroup, peer: int, name: str, *, is_gloo: bool, window: int | None) -> Endpoint:
        kind = LoggedEndpoint if self._is_logged else Endpoint
        return kind(self._connection, group, peer, name, is_gloo=is_gloo, window=window)

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        """This pipeline's ranks as a group; every rank of the world makes those of all pipelines."""
        for pipeline in range(self.topology.num_pipelines):
            group = new_group(self.topology.ranks_of_pipeline(pipeline), self.timeout, backend)
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

    def _abort(self) -> None:
        """End operations on an accelerator that wait for a failed rank. Gloo has nothing to abort."""
        for group in list(self._groups):
            group.abort()

    def _disconnect(self) -> None:
        """Drop the process groups. Gloo closes its connections, which wakes the peers, when nothing refers to them
        any more: no work, no endpoint, no group."""
        for receive in self._receives:
            receive.abandon()
        self._receives.clear()
        ends = (self._outgoing, self._incoming, self._control, self._reads)
        for endpoint in itertools.chain.from_iterable(end.values() for end in ends):
            endpoint.close()
        self._outgoing, self._incoming, self._control, self._reads = {}, {}, {}, {}
        groups, self._groups, self.control_group = self._groups, [], None
        while groups and dist.is_initialized():
            dist.destroy_process_group(groups.pop())


def _no_route(channel: Channel, source: int, destination: int) -> NoReturn:
    raise ValueError(
        f"no {Channel(channel).name} route from stage {source} to stage {destination}: "
        f"name it in the `routes` of the transport"
    )
