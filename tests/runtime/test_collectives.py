"""Collectives over all ranks within a step are those of the replicas: of one, what they are in a group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lightning_pipeline.runtime.collectives import over_replicas


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    yield


def test_one_replica_is_a_group_of_one() -> None:
    own, like = torch.arange(3.0), torch.arange(3.0)
    with over_replicas(1):
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
    assert (dist.get_world_size(), dist.get_rank()) == (2, 1)


def test_several_replicas_would_wait_for_ever() -> None:
    with over_replicas(2):
        assert dist.get_world_size() == 2
        for collective in (dist.all_reduce, dist.broadcast, dist.barrier):
            with pytest.raises(RuntimeError, match=r"over all ranks within a step.*self\.all_gather.*test_collectives"):
                collective(torch.ones(1))


def test_one_rank_does_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    before = dist.all_reduce
    with over_replicas(1):
        assert dist.all_reduce is before
