"""Tensor parallelism within a stage, which the user's `configure_model` has set up."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lightning_pipeline import _torch
from lightning_pipeline.runtime.backends import broadcast, warm_up
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.topology import Topology


class TensorGroup:
    """The ranks among which a replica of a stage is split. They see the same data and draw the same random numbers.

    Every rank of the world makes it at the same point, after ``init_process_group``.

    Attributes:
        mesh: of all ranks, with dimensions ``("stage", "data_parallel", "tensor_parallel")``.
        group: these ranks.
    """

    # Modules keep the mesh by which their tensors are split, and DTensor's caches the first one that is equal to it: so
    # later runs have the same one, and a failure does not close its groups.
    _shared: ClassVar[dict[tuple[Topology, str], TensorGroup]] = {}

    def __init__(self, topology: Topology, device_type: str) -> None:
        self.mesh = topology.mesh(device_type)
        self.group = self.mesh["tensor_parallel"].get_group()
        for group in self.mesh.get_all_groups():
            warm_up(group)
        self._source = dist.get_global_rank(self.group, 0)

    @classmethod
    def shared(cls, topology: Topology, device_type: str, timeout: timedelta) -> TensorGroup:
        """This process's, or a new one. `timeout`: the longest that a collective may take from now on."""
        known = topology, device_type
        if known not in cls._shared or not _torch.is_open(cls._shared[known].group):
            cls._shared[known] = cls(*known)
        for group in cls._shared[known].mesh.get_all_groups():
            _torch.set_group_timeout(timeout, group)
        return cls._shared[known]

    def same(self, value: Any) -> Any:
        """The first rank's value, on all of them."""
        values = [value]
        with waiting_for("the first tensor-parallel rank's batch"):
            dist.broadcast_object_list(values, self._source, group=self.group)
        return values[0]

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast the first rank's values of tensors that are not split."""
        with waiting_for("the first tensor-parallel rank's values"):
            for tensor in tensors:
                broadcast(tensor, self._source, self.group)
