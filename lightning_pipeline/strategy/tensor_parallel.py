"""The ranks of one replica of a stage: tensor parallelism, which the user's `configure_model` has set up, or context
parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lightning_pipeline import _torch
from lightning_pipeline.runtime.backends import broadcast, own_group, warm_up
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.topology import Topology


class TensorGroup:
    """The ranks among which a replica of a stage is split, or its sequences are cut.

    They see the same data and draw the same random numbers.

    Every rank of the world makes it at the same point, after ``init_process_group``.

    Attributes:
        mesh: of all ranks, with dimensions ``("stage", "data_parallel", "tensor_parallel")``; with context parallelism
            the last one is ``"context_parallel"``.
        control_group: the same, with context parallelism over Gloo, for tensors on the CPU.
        stage_group: with context parallelism all ranks of this stage, those of other replicas included.
    """

    # Modules keep the mesh by which their tensors are split, and DTensor's caches the first one that is equal to it: so
    # later runs have the same one, and a failure does not close its groups.
    _shared: ClassVar[dict[tuple[Topology, str], TensorGroup]] = {}

    def __init__(self, topology: Topology, device_type: str, timeout: timedelta) -> None:
        self.mesh = topology.mesh(device_type)
        self.group = self.mesh.get_group(2)
        for group in self.mesh.get_all_groups():
            warm_up(group)
        self.stage_group = self.control_group = self.group
        if topology.context_parallel_size > 1:
            self.control_group = _neighbours(topology.replica_size, topology, timeout, dist.Backend.GLOO)
            self.stage_group = _neighbours(topology.num_pipelines, topology, timeout, None)
            warm_up(self.stage_group)
        self._source = dist.get_global_rank(self.group, 0)

    @classmethod
    def shared(cls, topology: Topology, device_type: str, timeout: timedelta) -> TensorGroup:
        """This process's, or a new one. `timeout`: the longest that a collective may take from now on."""
        known = topology, device_type
        if known not in cls._shared or not _torch.is_open(cls._shared[known].group):
            cls._shared[known] = cls(*known, timeout)
        found = cls._shared[known]
        for group in (*found.mesh.get_all_groups(), found.stage_group, found.control_group):
            _torch.set_group_timeout(timeout, group)
        return found

    def same(self, value: Any) -> Any:
        """The first rank's value, on all of them."""
        values = [value]
        with waiting_for("the batch of a replica's first rank"):
            dist.broadcast_object_list(values, self._source, group=self.group)
        return values[0]

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast the first rank's values of tensors that are not split."""
        with waiting_for("the values of a replica's first rank"):
            for tensor in tensors:
                broadcast(tensor, self._source, self.group)


def _neighbours(size: int, topology: Topology, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    """The group of this rank among those of so many neighbours."""
    of_all = [range(start, start + size) for start in range(0, topology.world_size, size)]
    return own_group(of_all, topology.rank, timeout, backend)
