"""Communication between replicas: the ranks that hold the same stage and see other samples."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.runtime.backends import broadcast, new_group, warm_up
from lightning_pipeline.runtime.connecting import connect
from lightning_pipeline.runtime.errors import ranks
from lightning_pipeline.runtime.failure import raise_failure, waiting_for
from lightning_pipeline.runtime.store import BoundedStore
from lightning_pipeline.runtime.streams import Stream
from lightning_pipeline.runtime.topology import Topology


class Replicas:
    """The replicas of this rank's stage.

    Every rank of the world makes it at the same point, after ``init_process_group``.

    Args:
        timeout: the longest that a collective may take.

    Attributes:
        group: carries tensors on the device.
        control_group: carries objects and tensors on the CPU.
    """

    # The groups outlive a strategy, as connections between stages do.
    _shared: ClassVar[list[Replicas]] = []

    def __init__(self, topology: Topology, timeout: timedelta) -> None:
        self.topology = topology
        self.timeout = timeout
        self.group = self._new_group(timeout, None)
        warm_up(self.group)
        self.control_group: dist.ProcessGroup | None = self._new_group(timeout, dist.Backend.GLOO)
        self._streams = self._connected()

    @classmethod
    def shared(cls, topology: Topology, timeout: timedelta) -> Replicas | None:
        """The open replicas of this process with these arguments, or new ones; None if there is one replica only."""
        if topology.data_parallel_size == 1:
            return None
        cls._shared = [replicas for replicas in cls._shared if replicas.is_open]
        for replicas in cls._shared:
            if (replicas.topology, replicas.timeout) == (topology, timeout):
                return replicas
        cls._shared.append(cls(topology, timeout))
        return cls._shared[-1]

    @property
    def is_open(self) -> bool:
        return _torch.is_open(self.group)

    @property
    def num_replicas(self) -> int:
        return self.topology.data_parallel_size

    def send_object(self, obj: Any, replica: int) -> None:
        """Send a small object to this stage of another replica."""
        rank = self.topology.data_ranks[replica]
        with waiting_for(f"the receipt of an object by {self.topology.describe(rank)}", rank):
            dist.send_object_list([obj], group_dst=replica, group=self.control_group)

    def recv_object(self, replica: int, what: str) -> Any:
        """The next object from this stage of another replica. `what` names it in errors."""
        received: list[Any] = [None]
        rank = self.topology.data_ranks[replica]
        with waiting_for(f"{what} from {self.topology.describe(rank)}", rank):
            dist.recv_object_list(received, group_src=replica, group=self.control_group)
        return received[0]

    def send_on_control(self, tensor: Tensor, replica: int, *, waits: bool) -> None:
        """Send a contiguous tensor on the CPU to this stage of another replica. It always waits until it has left."""
        rank = self.topology.data_ranks[replica]
        with waiting_for(f"the receipt of a tensor by {self.topology.describe(rank)}", rank):
            dist.send(tensor, group_dst=replica, group=self.control_group)

    def receive_on_control(self, buffer: Tensor, replica: int, what: str) -> Tensor:
        """Receive what another replica has sent by `send_on_control`."""
        rank = self.topology.data_ranks[replica]
        with waiting_for(f"{what} from {self.topology.describe(rank)}", rank):
            dist.recv(buffer, group_src=replica, group=self.control_group)
        return buffer

    def gather_objects(self, obj: Any) -> list[Any]:
        """Every replica's `obj`, in the order of replicas, on all of them."""
        gathered: list[Any] = [None] * self.num_replicas
        with waiting_for(f"an object of each replica ({self._others})"):
            dist.all_gather_object(gathered, obj, group=self.control_group)
        return gathered

    def gather_numbers(self, *numbers: float) -> list[list[float]]:
        """Every replica's `numbers`, in the order of replicas, on all of them.

        Over streams, as steps do it several times: where ranks share cores, Gloo's threads take four times as long.
        """
        packed = struct.pack(f"<{len(numbers)}d", *numbers)
        with waiting_for(f"a number of each replica ({self._others})"):
            arriving = {rank: stream.receive(None) for rank, stream in self._streams.items()}
            for stream in self._streams.values():
                stream.send(packed)
            for message in arriving.values():
                message.wait(self.timeout, raise_failure)
        gathered = []
        for rank in self.topology.data_ranks:
            data = packed if rank == self.topology.rank else arriving[rank].data
            if len(data) != len(packed):
                raise RuntimeError(f"{self.topology.describe(rank)} is at another exchange of the replicas than this")
            gathered.append(list(struct.unpack(f"<{len(numbers)}d", data)))
        return gathered

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first replica's values to all replicas."""
        source = self.topology.data_ranks[0]
        with waiting_for(f"the first replica's values, by {ranks(self.topology.data_ranks)}"):
            for tensor in tensors:
                broadcast(tensor, source, self.group)

    @property
    def _others(self) -> str:
        return ranks(rank for rank in self.topology.data_ranks if rank != self.topology.rank)

    @classmethod
    def close_all(cls) -> None:
        """After a failure: drop all groups of this process, which wakes up ranks that wait in them. Never raises."""
        for replicas in cls._shared:
            for group in (replicas.group, replicas.control_group):
                if _torch.is_open(group):
                    dist.destroy_process_group(group)
            for stream in replicas._streams.values():
                stream.close()

    def _connected(self) -> dict[int, Stream]:
        """Streams to the other replicas, by rank."""
        rank = self.topology.rank
        store = BoundedStore(_torch.default_store(), rank=rank, limit=self.timeout)
        wanted = [(other, 0) for other in self.topology.data_ranks if other != rank]
        found = connect(store, rank, wanted, self.timeout, raise_failure)
        return {other: stream for (other, _), stream in found.items()}

    def _new_group(self, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
        """The group of this stage's replicas. Every rank of the world makes those of all stages, as torch asks."""
        members = [tuple(replace(self.topology, rank=rank).data_ranks) for rank in range(self.topology.world_size)]
        groups = {ranks: new_group(ranks, timeout, backend) for ranks in dict.fromkeys(members)}
        return groups[tuple(self.topology.data_ranks)]


def all_gather(tensor: Tensor, group: dist.ProcessGroup, *, sync_grads: bool = False) -> Tensor:
    """Every rank's `tensor`, which has the same shape on all of them, as [number of ranks, ...].

    Args:
        sync_grads: whether it can be differentiated: each rank's tensor gets the sum of the gradients of all ranks.
    """
    if sync_grads:
        return _AllGather.apply(tensor, group)
    with torch.no_grad():
        return _gathered(tensor, group)


class _AllGather(torch.autograd.Function):
    """As in torch.distributed.nn, whose own confuses ranks of a group with ranks of the world over Gloo."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        with waiting_for("the gradients of what all ranks gathered"):
            dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    with waiting_for("a tensor of all ranks"):
        dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)
