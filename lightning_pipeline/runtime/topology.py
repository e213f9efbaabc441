"""The topology of a run: which rank holds which stage of which replica, and the routes between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ReplicaRank(int):
    """The rank as steps and hooks get it, where ``world_size`` is the number of replicas.

    As a number it counts replicas, and is less than ``world_size``: samples are shared out with it, and labels of
    gathered features found, ``torch.arange(n) + n * rank``, alike on all stages of a replica. Compared by ``==`` and
    ``!=``, as a condition and as text it is the rank of the process: ``if rank == 0`` is for one process alone, and
    each process writes to a file of its own.
    """

    process: int

    def __new__(cls, replica: int, process: int = 0) -> ReplicaRank:
        rank = super().__new__(cls, replica)
        rank.process = process
        return rank

    def __eq__(self, other: object) -> bool:
        return self.process == other

    def __ne__(self, other: object) -> bool:  # int has its own
        return self.process != other

    def __bool__(self) -> bool:
        return self.process != 0

    def __str__(self) -> str:
        return str(self.process)

    def __format__(self, spec: str) -> str:
        return format(self.process, spec)

    def __hash__(self) -> int:
        return hash(self.process)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks laid out as a grid of (stage, replica), replicas of one stage side by side.

        world_size=6, num_ranks_per_pipeline=3        replica 0   replica 1
                                            stage 0   rank 0      rank 1
                                            stage 1   rank 2      rank 3
                                            stage 2   rank 4      rank 5

    With tensor or context parallelism each replica of a stage is several neighbouring ranks, which hold slices of its
    tensors, or parts of its sequences; the n-th ranks of all stages make a pipeline of their own.

    Args:
        num_ranks_per_pipeline: ranks of one pipeline, as many as stages.
        world_size: number of all ranks.
        rank: this process.
        placement: the place in the pipeline of each virtual stage, for routes and messages; empty if each rank has one,
            in the order of the ranks.
        tensor_parallel_size: ranks among which the tensors of one replica of a stage are split.
        context_parallel_size: ranks among which the sequences of one replica of a stage are cut; not both.

    Raises:
        ValueError: there are more stages than devices, or the number of devices is no multiple of the stages.
    """

    num_ranks_per_pipeline: int
    world_size: int
    rank: int
    placement: tuple[int, ...] = ()
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        stages, world = self.num_ranks_per_pipeline, self.world_size
        if stages < 1 or world < 1:
            raise ValueError(f"a pipeline needs at least 1 stage and 1 device, got {stages} stages and {world} devices")
        if stages > world:
            raise ValueError(
                f"{stages} stages need at least {stages} devices, got {world}: "
                f"set devices={stages} (or num_nodes) in the Trainer, or num_stages={world} or fewer"
            )
        if world % stages:
            divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise ValueError(
                f"{world} devices are not a multiple of {stages} stages: use {world - world % stages} or "
                f"{world - world % stages + stages} devices, or a num_stages that divides {world} ({divisors})"
            )
        for name in ("tensor_parallel_size", "context_parallel_size"):
            size = getattr(self, name)
            if size < 1 or (world // stages) % size:
                raise ValueError(
                    f"{world} devices in {stages} stages are {world // stages} to a stage, which {name}={size} does "
                    f"not divide: use devices={stages * size}"
                )
        if not 0 <= self.rank < world:
            raise ValueError(f"rank must be in 0..{world - 1}, got {self.rank}")

    def along(self, placement: Sequence[int]) -> Topology:
        """The same topology with virtual stages on these places."""
        in_order = tuple(placement) == tuple(range(self.num_stages))
        return replace(self, placement=() if in_order else tuple(placement))

    @property
    def num_stages(self) -> int:
        return self.num_ranks_per_pipeline

    @property
    def num_pipelines(self) -> int:
        """Number of ranks of a stage, each of which is in a pipeline of its own."""
        return self.world_size // self.num_ranks_per_pipeline

    @property
    def pipeline(self) -> int:
        """This rank's pipeline, 0 .. num_pipelines - 1."""
        return self.rank % self.num_pipelines

    @property
    def replica_size(self) -> int:
        """Ranks of one replica of a stage, which see the same data."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Replicas of each stage, which see different data."""
        return self.num_pipelines // self.replica_size

    @property
    def stage_rank(self) -> int:
        """This rank's place in the pipeline, 0 .. num_stages - 1: its stage, unless they are placed otherwise."""
        return self.rank // self.num_pipelines

    @property
    def replica(self) -> int:
        """This rank's replica, 0 .. data_parallel_size - 1."""
        return self.pipeline // self.replica_size

    @property
    def ranks_of_first_stage(self) -> list[int]:
        """Global ranks that read each replica's data; the first of those that share it."""
        return list(range(0, self.num_pipelines, self.replica_size))

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is the first of its pipeline, which reads the data, whatever its stage."""
        return self.stage_rank == 0

    @property
    def pipeline_ranks(self) -> list[int]:
        """Global ranks of this rank's pipeline, in stage order."""
        return self.ranks_of_pipeline(self.pipeline)

    @property
    def data_ranks(self) -> list[int]:
        """Global ranks that hold the same as this one, one of each replica."""
        start = self.stage_rank * self.num_pipelines + self.pipeline % self.replica_size
        return list(range(start, start + self.num_pipelines, self.replica_size))

    def ranks_of_pipeline(self, pipeline: int) -> list[int]:
        """Global ranks of one pipeline, in stage order."""
        return list(range(pipeline, self.world_size, self.num_pipelines))

    def describe(self, rank: int) -> str:
        """``"stage 1 (rank 2)"``, or ``"rank 2 (virtual stages 1 and 3)"``, as error messages write it."""
        place = rank // self.num_pipelines
        placement = self.placement or range(self.num_stages)
        stages = [str(stage) for stage, other in enumerate(placement) if other == place]
        if len(placement) == self.num_stages:
            return f"stage {stages[0]} (rank {rank})"
        return f"rank {rank} (virtual stages {' and '.join(stages)})"

    def mesh(self, device_type: str) -> DeviceMesh:
        """A DeviceMesh for tensor or context parallelism. Every rank calls it, as it makes process groups.

        Its dimensions are ``("stage", "data_parallel", "tensor_parallel")``, the names that modules for Lightning's
        ModelParallelStrategy expect; with context parallelism the last one is ``"context_parallel"``.
        """
        from torch.distributed.device_mesh import init_device_mesh

        inner = "tensor_parallel" if self.tensor_parallel_size > 1 else "context_parallel"
        shape = (self.num_stages, self.data_parallel_size, self.replica_size)
        return init_device_mesh(device_type, shape, mesh_dim_names=("stage", "data_parallel", inner))


class Channel(IntEnum):
    """Streams of tensors which do not wait for one another."""

    FORWARD = 0  # activations
    BACKWARD = 1  # gradients
    BATCH = 2  # batch tensors, from stage 0
    SHARED = 3  # parameters that several stages hold, and their gradients


class Route(NamedTuple):
    """One direction of a channel between two stages."""

    channel: Channel
    source: int
    destination: int

    def peer_of(self, stage: int) -> int:
        """The stage at the other end."""
        return self.destination if stage == self.source else self.source


def routes_along(placement: Sequence[int]) -> list[Route]:
    """The routes of a pipeline, given the rank of each virtual stage."""
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


def stage_term(placement: Sequence[int]) -> str:
    """What messages call a stage: a "virtual stage" if ranks hold several."""
    return "virtual stage" if len(placement) > max(placement) + 1 else "stage"
