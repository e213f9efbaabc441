"""Replicas: the ranks that run the same stages on other samples, and all-gathers over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.runtime.backends import broadcast, warm_up
from lightning_pipeline.runtime.errors import ranks
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.groups import new_group
from lightning_pipeline.runtime.topology import Topology


class Replicas:
    """The data-parallel group of this rank.

    Every rank of the world makes it at the same point, after ``init_process_group``.

    Args:
        topology: where this rank is.
        timeout: the longest a collective may take.

    Attributes:
        group: carries tensors, over the device's own backend.
        control_group: carries objects and tensors in host memory.
    """

    # As connections between stages do, the groups outlive a strategy.
    _shared: ClassVar[list[Replicas]] = []

    def __init__(self, topology: Topology, timeout: timedelta) -> None:
        self.topology = topology
        self.timeout = timeout
        self.group = self._new_group(timeout, None)
        warm_up(self.group)
        self.control_group: dist.ProcessGroup | None = self._new_group(timeout, dist.Backend.GLOO)

    @classmethod
    def shared(cls, topology: Topology, timeout: timedelta) -> Replicas | None:
        """The open group of this process with these arguments, or a new one; None where there is one replica."""
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
        return dist.is_initialized() and self.group in dist.distributed_c10d._world.pg_map

    @property
    def num_replicas(self) -> int:
        return self.topology.data_parallel_size

    def send_object(self, obj: Any, replica: int) -> None:
        """Send a small object to another replica's rank of this stage."""
        rank = self.topology.data_ranks[replica]
        with waiting_for(f"the receipt of an object by {self.topology.describe(rank)}", rank):
            dist.send_object_list([obj], group_dst=replica, group=self.control_group)

    def recv_object(self, replica: int, what: str) -> Any:
        """The next object from another replica. `what` names it in errors."""
        received: list[Any] = [None]
        rank = self.topology.data_ranks[replica]
        with waiting_for(f"{what} from {self.topology.describe(rank)}", rank):
            dist.recv_object_list(received, group_src=replica, group=self.control_group)
        return received[0]

    def gather_objects(self, obj: Any) -> list[Any]:
        """Every replica's `obj`, by replica, on all of them."""
        gathered: list[Any] = [None] * self.num_replicas
        with waiting_for(f"an object of each replica ({self._others})"):
            dist.all_gather_object(gathered, obj, group=self.control_group)
        return gathered

    def gather_numbers(self, *numbers: float) -> list[list[float]]:
        """Every replica's `numbers`, by replica, on all of them."""
        own = torch.tensor(numbers, dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self.num_replicas)]
        with waiting_for(f"a number of each replica ({self._others})"):
            dist.all_gather(gathered, own, group=self.control_group)
        return [row.tolist() for row in gathered]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Give all replicas the first one's values."""
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
                if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
                    dist.destroy_process_group(group)

    def _new_group(self, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
        """The ranks that hold the same as this one, as a group; every rank of the world makes all such groups."""
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for rank in range(self.topology.world_size):
            members = tuple(replace(self.topology, rank=rank).data_ranks)
            if members not in groups:
                groups[members] = new_group(members, timeout, backend)
        return groups[tuple(self.topology.data_ranks)]


def all_gather(tensor: Tensor, group: dist.ProcessGroup, *, sync_grads: bool = False) -> Tensor:
    """Every rank's `tensor`, which has one shape on all of them, as [number of ranks, ...].

    Args:
        sync_grads: backward gives each rank the sum of what all ranks' results mean for its own tensor; else there is
            no backward.
    """
    if sync_grads:
        return _AllGather.apply(tensor, group)
    with torch.no_grad():
        return _gathered(tensor, group)


class _AllGather(torch.autograd.Function):
    """That of torch.distributed.nn takes, over Gloo, a rank's place in its group for its rank in the world."""

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
