"""Collectives over all ranks within a step are those of the replicas: of one, what they are in a group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn as distributed_nn
from torch.distributed import all_reduce, get_rank, get_world_size
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DistributedSampler

from lightning_pipeline.engine.collectives import over_replicas
from lightning_pipeline.engine.replica_collectives import World
from lightning_pipeline.runtime.topology import Topology

ONE = World(Topology(num_ranks_per_pipeline=4, world_size=4, rank=3))
TWO = World(Topology(num_ranks_per_pipeline=2, world_size=4, rank=3))
FOUR = World(Topology(num_ranks_per_pipeline=1, world_size=4, rank=3))


@pytest.fixture(autouse=True, scope="module")
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_one_replica_is_a_group_of_one() -> None:
    own, like = torch.arange(3.0), torch.arange(3.0)
    with over_replicas(ONE):
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        dist.all_reduce(own)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        dist.broadcast(own, src=0)
        dist.reduce(own, 0)
        dist.barrier()
        handle = dist.all_reduce(own, async_op=True)
        assert handle.wait() and handle.is_completed()
        assert own.equal(like)

        [part] = parts = [torch.empty(3)]
        dist.all_gather(parts, own)
        assert part.equal(like)
        part.zero_()
        dist.gather(own, gather_list=parts, dst=0)
        assert part.equal(like)
        part.zero_()
        dist.scatter(part, [own], src=0)
        assert part.equal(like)
        part.zero_()
        dist.reduce_scatter(part, [own])
        assert part.equal(like)
        part.zero_()
        dist.all_to_all([part], [own])
        assert part.equal(like)

        for collective in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single):
            output = torch.empty(3)
            collective(output, own)
            assert output.equal(like)

        objects: list[object] = [None]
        dist.all_gather_object(objects, "a")
        assert objects == ["a"]
        dist.gather_object("b", objects)
        assert objects == ["b"]
        dist.scatter_object_list(objects, ["c"])
        dist.broadcast_object_list(objects)
        assert objects == ["c"]
    assert (dist.get_world_size(), dist.get_rank()) == (4, 3)


def test_functions_that_were_imported_by_name_are_seen() -> None:
    own = torch.ones(2)
    with over_replicas(ONE):
        assert (get_world_size(), get_rank(group=dist.group.WORLD)) == (1, 0)
        with over_replicas(ONE):
            all_reduce(own)
        assert get_rank() == dist.get_rank() == 0
    assert own.tolist() == [1, 1]
    assert (get_world_size(), get_rank()) == (4, 3)
    with over_replicas(TWO):
        all_reduce(own)
    assert own.tolist() == [2, 2]


def test_torch_counts_processes() -> None:
    group = dist.new_group([1, 3])
    with over_replicas(ONE):
        assert dist.distributed_c10d._get_default_group().size() == 4
        assert dist.device_mesh.init_device_mesh("cpu", (4,)).get_local_rank() == 3
        assert (dist.get_world_size(group), get_rank(group)) == (2, 1)


def test_a_gradient_goes_back_through_a_collective() -> None:
    own = torch.ones(2, requires_grad=True)
    with over_replicas(ONE):
        (part,) = distributed_nn.all_gather(own)
        (part * 3).sum().backward()
        (distributed_nn.all_reduce(own) * 2).sum().backward()
    assert own.grad is not None and own.grad.tolist() == [5, 5]


def test_replicas_are_counted() -> None:
    with over_replicas(TWO):
        assert list(DistributedSampler(list(range(4)), shuffle=False)) == [1, 3]  # type: ignore[arg-type]
        assert (get_world_size(), get_rank()) == (2, 1) == (dist.get_world_size(), dist.get_rank())


def test_replicas_that_are_alike() -> None:
    """Where a step is measured, the others are taken to be like this one."""
    own, halves = torch.tensor([1, 2]), torch.arange(4.0).view(2, 2)
    parts = [torch.zeros(2), torch.zeros(2)]
    with over_replicas(TWO):
        for op, expected in {
            dist.ReduceOp.SUM: [2, 4],
            dist.ReduceOp.PRODUCT: [4, 16],
            dist.ReduceOp.MAX: [4, 16],
            dist.ReduceOp.BAND: [4, 16],
            dist.ReduceOp.BXOR: [0, 0],
        }.items():
            dist.all_reduce(own, op)
            assert own.tolist() == expected
        dist.all_gather(parts, halves[1])
        assert [part.tolist() for part in parts] == [[2, 3], [2, 3]]
        dist.reduce_scatter(parts[0], list(halves))
        assert parts[0].tolist() == [4, 6]
        dist.reduce_scatter_tensor(parts[0], halves.flatten())
        assert parts[0].tolist() == [4, 6]
        dist.scatter(parts[0], list(halves), src=0)
        assert parts[0].tolist() == [2, 3]
        dist.all_to_all_single(halves, halves.clone())
        assert halves.tolist() == [[2, 3], [2, 3]]
        objects: list[object] = [None, None]
        dist.all_gather_object(objects, "a")
        assert objects == ["a", "a"]
        with pytest.raises(NotImplementedError, match=r"PREMUL_SUM.*test_collectives"):
            dist.all_reduce(own, dist.ReduceOp.PREMUL_SUM)


def test_where_every_rank_is_a_replica_they_do_as_ever() -> None:
    with over_replicas(FOUR):
        dist.all_reduce(torch.ones(1))
        assert get_world_size() == 4
