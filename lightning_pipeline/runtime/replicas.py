"""Communication between replicas: the ranks that hold the same stage and see other samples."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.runtime.backends import broadcast, own_group, warm_up
from lightning_pipeline.runtime.connecting import connect
from lightning_pipeline.runtime.endpoint import view_of
from lightning_pipeline.runtime.errors import ranks
from lightning_pipeline.runtime.failure import raise_failure, waiting_for
from lightning_pipeline.runtime.store import BoundedStore
from lightning_pipeline.runtime.streams import Stream
from lightning_pipeline.runtime.topology import Topology

_NUMBERS, _OBJECTS = 0, 1  # tags of messages


class Replicas:
    """The replicas of this rank's stage.

    Every rank of the world makes it at the same point, after ``init_process_group``.

    Args:
        timeout: the longest that a collective may take.

    Attributes:
        group: carries tensors on the device. Streams carry objects and tensors on the CPU: where ranks share cores,
            Gloo's threads take four times as long.
    """

    # The groups outlive a strategy, as connections between stages do.
    _shared: ClassVar[list[Replicas]] = []

    def __init__(self, topology: Topology, timeout: timedelta) -> None:
        self.topology = topology
        self.timeout = timeout
        of_all = {tuple(replace(topology, rank=rank).data_ranks): None for rank in range(topology.world_size)}
        self.group = own_group(of_all, topology.rank, timeout, None)
        warm_up(self.group)
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
        self._send(pickle.dumps(obj), replica, "an object")

    def recv_object(self, replica: int, what: str) -> Any:
        """The next object from this stage of another replica. `what` names it in errors."""
        return pickle.loads(self._receive(None, replica, what))

    def send_on_control(self, tensor: Tensor, replica: int, *, waits: bool) -> None:
        """Send a contiguous tensor on the CPU to this stage of another replica. It always waits until it has left."""
        self._send(view_of(tensor), replica, "a tensor")

    def receive_on_control(self, buffer: Tensor, replica: int, what: str) -> Tensor:
        """Receive what another replica has sent by `send_on_control`."""
        self._receive(view_of(buffer), replica, what)
        return buffer

    def gather_objects(self, obj: Any) -> list[Any]:
        """Every replica's `obj`, in the order of replicas, on all of them."""
        return [pickle.loads(data) for data in self._gather(pickle.dumps(obj), _OBJECTS, "an object")]

    def gather_numbers(self, *numbers: float) -> list[list[float]]:
        """Every replica's `numbers`, in the order of replicas, on all of them."""
        packed = struct.pack(f"<{len(numbers)}d", *numbers)
        gathered = self._gather(packed, _NUMBERS, "a number")
        for rank, data in zip(self.topology.data_ranks, gathered, strict=True):
            if len(data) != len(packed):
                raise RuntimeError(f"{self.topology.describe(rank)} is at another exchange of the replicas than this")
        return [list(struct.unpack(f"<{len(numbers)}d", data)) for data in gathered]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first replica's values to all replicas."""
        source = self.topology.data_ranks[0]
        with waiting_for(f"the first replica's values, by {ranks(self.topology.data_ranks)}"):
            for tensor in tensors:
                broadcast(tensor, source, self.group)

    @classmethod
    def close_all(cls) -> None:
        """After a failure: drop all groups of this process, which wakes up ranks that wait in them. Never raises."""
        for replicas in cls._shared:
            if replicas.is_open:
                dist.destroy_process_group(replicas.group)
            for stream in replicas._streams.values():
                stream.close()

    def _send(self, data: bytes | memoryview, replica: int, what: str) -> None:
        rank = self.topology.data_ranks[replica]
        with waiting_for(f"the receipt of {what} by {self.topology.describe(rank)}", rank):
            self._streams[rank].send(data, _OBJECTS).wait(self.timeout, raise_failure)

    def _receive(self, buffer: memoryview | None, replica: int, what: str) -> Any:
        rank = self.topology.data_ranks[replica]
        with waiting_for(f"{what} from {self.topology.describe(rank)}", rank):
            message = self._streams[rank].receive(buffer, _OBJECTS)
            message.wait(self.timeout, raise_failure)
        return message.data

    def _gather(self, own: bytes, tag: int, what: str) -> list[Any]:
        """Every replica's bytes, in the order of replicas."""
        others = ranks(rank for rank in self.topology.data_ranks if rank != self.topology.rank)
        with waiting_for(f"{what} of each replica ({others})"):
            arriving = {rank: stream.receive(None, tag) for rank, stream in self._streams.items()}
            leaving = [stream.send(own, tag) for stream in self._streams.values()]
            for message in (*arriving.values(), *leaving):
                message.wait(self.timeout, raise_failure)
        return [arriving[rank].data if rank in arriving else own for rank in self.topology.data_ranks]

    def _connected(self) -> dict[int, Stream]:
        """Streams to the other replicas, by rank."""
        rank = self.topology.rank
        store = BoundedStore(_torch.default_store(), rank=rank, limit=self.timeout)
        wanted = [(other, 0) for other in self.topology.data_ranks if other != rank]
        found = connect(store, rank, wanted, self.timeout, raise_failure)
        return {other: stream for (other, _), stream in found.items()}


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
