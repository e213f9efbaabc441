"""What HCCL asks of its users (`backend_rules`), as the real ProcessGroupHCCL and the stand-in show it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.runtime.backends import all_reduce, broadcast, warm_up
from tests.launching import launch, run_ranks
from tests.npu.ranks import connect

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64]


def collectives() -> None:
    rank, device = connect()
    numbers = torch.arange(4.0, device=device) + rank

    total = numbers.clone()
    dist.all_reduce(total)
    assert total.tolist() == [1, 3, 5, 7]
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        largest = numbers.to(dtype)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert largest.tolist() == [1, 2, 3, 4]
    everyone = torch.empty(8, device=device)
    dist.all_gather_into_tensor(everyone, numbers)
    assert everyone.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    half = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(half, numbers)
    assert half.tolist() == [[1, 3], [5, 7]][rank]
    theirs = numbers.clone()
    dist.broadcast(theirs, 1)
    assert theirs.tolist() == [1, 2, 3, 4]
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()


def messages() -> None:
    """Sends and receives of each dtype, one after another and as a batch."""
    rank, device = connect()
    peer = 1 - rank
    warm_up()  # a batch uses the whole group's communicator
    for dtype in DTYPES:
        sent = (torch.arange(5, device=device) + rank).to(dtype)
        received = torch.empty_like(sent)
        if rank == 0:
            dist.send(sent, peer)
            dist.recv(received, peer)
        else:
            dist.recv(received, peer)
            dist.send(sent, peer)
        assert received.tolist() == (torch.arange(5) + peer).to(dtype).tolist()
        received = torch.empty_like(sent)
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert received.tolist() == (torch.arange(5) + peer).to(dtype).tolist()


def tags_are_ignored() -> None:
    rank, device = connect()
    if rank == 0:
        dist.send(torch.tensor([1.0], device=device), 1, tag=1)
        dist.send(torch.tensor([2.0], device=device), 1, tag=2)
    else:
        second, first = torch.zeros(1, device=device), torch.zeros(1, device=device)
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
        assert (second.item(), first.item()) == (1, 2)  # in the order they were sent


def refusals() -> None:
    """What HCCL refuses, and what our functions make of it."""
    rank, device = connect()
    values = torch.arange(4, device=device).reshape(2, 2) + rank

    with pytest.raises(RuntimeError, match="must be contiguous"):
        dist.all_reduce(values.float().t())
    with pytest.raises(RuntimeError, match="Unsupported data type"):
        dist.group.WORLD.send([values.to(torch.complex64)], 1 - rank, 0)
    with pytest.raises(RuntimeError, match="Unsupported data type"):
        dist.all_reduce(values.double())

    total = values.double() / 3
    all_reduce(total).wait()
    parts = [(torch.arange(4).reshape(2, 2) + other).double() / 3 for other in range(2)]
    assert total.cpu().equal(parts[0] + parts[1])
    largest = values.double()
    all_reduce(largest, dist.ReduceOp.MAX).wait()
    assert largest.tolist() == [[1, 2], [3, 4]]
    turned = torch.complex(values.float(), values.float() + 1).t()
    broadcast(turned, 1)
    assert turned.tolist() == [[1 + 2j, 3 + 4j], [2 + 3j, 4 + 5j]]


@pytest.mark.parametrize("body", [collectives, messages, tags_are_ignored, refusals])
def test_two_ranks(body: Callable[[], None]) -> None:
    launch(body, world=2)


def both_send_first() -> None:
    """Each rank sends before it receives, on the one stream that the pair has."""
    rank, device = connect()
    sent, received = torch.ones(1, device=device), torch.zeros(1, device=device)
    works = [dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)]
    for work in works:
        work.wait()
    received.item()


def ring_of_first_uses() -> None:
    """Each of three ranks sends to the next one, and then receives from the one before."""
    os.environ["HCCL_CONNECT_TIMEOUT"] = "3"
    rank, device = connect()
    dist.send(torch.ones(1, device=device), (rank + 1) % 3)
    dist.recv(torch.ones(1, device=device), (rank + 2) % 3)


def a_batch_that_others_miss() -> None:
    """Two of three ranks exchange a batch, whose communicator is that of all three."""
    os.environ["HCCL_CONNECT_TIMEOUT"] = "3"
    rank, device = connect()
    if rank < 2:
        value: Tensor = torch.ones(1, device=device)
        operation = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(operation, value, 1 - rank)]):
            work.wait()


@pytest.mark.parametrize(
    ("body", "world", "told"),
    [
        (both_send_first, 2, "is at a send of 1 elements"),
        (ring_of_first_uses, 3, "its first use comes in different orders on its ranks"),
        (a_batch_that_others_miss, 3, "to make a communicator of 3 with it"),
    ],
)
def test_deadlocks_come_to_light(body: Callable[[], None], world: int, told: str) -> None:
    ended = run_ranks(body, world=world)
    assert all(end.error for end in ended[:2])
    assert any("deadlock" in end.error and told in end.error for end in ended)  # the first to end may end the others
