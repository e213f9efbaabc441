"""The rules of HCCL, as far as they show without it; `tests/npu` has the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.runtime import backends
from lightning_pipeline.runtime.tensor_meta import as_bytes, from_bytes, num_bytes, places
from lightning_pipeline.runtime.topology import Channel, Route, routes_along
from lightning_pipeline.strategy.local_module import _checksum
from tests.launching import PATIENCE_S, launch


def connects(routes: Iterable[Route], order_on: Callable[[int], list[Route]]) -> bool:
    """Whether all routes get connected where each rank takes its own in its order, and waits for the other side."""
    left = {rank: [route for route in order_on(rank) if rank in route[1:]] for rank in {r.source for r in routes}}
    while any(left.values()):
        ready = [own[0] for own in left.values() if own and left[own[0].source][0] == left[own[0].destination][0]]
        if not ready:
            return False
        for rank in ready[0][1:]:
            left[rank].pop(0)
    return True


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_first_uses_do_not_wait_in_a_ring(num_ranks: int) -> None:
    routes = routes_along([*range(num_ranks), *range(num_ranks)])  # virtual stages: from the last rank to the first
    assert Route(Channel.FORWARD, num_ranks - 1, 0) in routes
    assert connects(routes, lambda rank: backends.first_uses(routes))
    assert not connects(routes, lambda rank: sorted(routes, key=lambda route: route.source != rank))


def test_pairs_need_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.check_environment("hccl")
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "20")
    backends.check_environment("hccl")
    for value in ("0", "", "none"):
        monkeypatch.setenv("P2P_HCCL_BUFFSIZE", value)
        backends.check_environment("gloo")
        with pytest.raises(ValueError, match=rf"P2P_HCCL_BUFFSIZE={value} gives all .* unset it"):
            backends.check_environment("hccl")


def sums() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_S))
    backends.warm_up()
    values = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) / 3 + rank
    sent = values.clone()
    dist.all_reduce(sent)
    largest = values.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    refused = {"gloo": {torch.float64, torch.complex128}}
    with pytest.MonkeyPatch.context() as patch:
        for table in ({}, refused):
            patch.setattr(backends, "NOT_REDUCED", table)
            result = values.clone()
            backends.all_reduce(result).wait()
            assert result.equal(sent)
            result = values.clone()
            backends.all_reduce(result, dist.ReduceOp.MAX).wait()
            assert result.equal(largest)
            assert backends.reduce(values.clone(), "mean").equal(sent / 2)
            assert backends.reduce(values.clone(), "max").equal(largest)
            result = torch.complex(values, values)
            backends.all_reduce(result).wait()
            assert result.equal(torch.complex(sent, sent))
    assert backends.reduce(torch.tensor([rank, 4]), "avg").tolist() == [0, 4]
    assert backends.reduce(torch.tensor([rank, 4]), None).tolist() == [1, 8]
    with pytest.raises(RuntimeError):
        dist.group.WORLD.send([values.t()], 1 - rank, 0)
    turned = torch.complex(values, values).conj().t()
    backends.broadcast(turned, 1)
    assert turned.equal(torch.complex(values - rank + 1, -(values - rank + 1)).t())
    dist.destroy_process_group()


@pytest.mark.multiprocess
def test_what_a_backend_does_not_add_up_is_gathered() -> None:
    launch(sums, world=2)


def test_bytes_of_parts_of_a_memory() -> None:
    numbers = torch.arange(20.0)
    for part in (numbers[1::2][:1], numbers[1:], numbers[3:3], torch.tensor(2.0), numbers.view(4, 5)[1]):
        assert backends.bytes_of(part).view(torch.float32).tolist() == part.flatten().tolist()
        backends.bytes_of(part).fill_(0)  # a view, into which messages are received
        assert not part.any()


def test_values_of_all_dtypes_travel_in_one_message() -> None:
    values = [torch.ones(1), torch.tensor(1 - 2j, dtype=torch.complex128), torch.ones(2, 3).t(), torch.tensor(True)]
    specs = [TensorSpec.of(value) for value in values]
    message = torch.zeros(num_bytes(specs), dtype=torch.uint8)
    for value, spec, place in zip(values, specs, places(specs), strict=True):
        message[place] = as_bytes(value, spec)
    for value, spec, place in zip(values, specs, places(specs), strict=True):
        arrived = from_bytes(message[place], spec)
        assert arrived.equal(value)
        assert (arrived.dtype, arrived.stride()) == (value.dtype, value.stride())


def test_values_of_ranks_are_compared_wherever_they_lie_in_memory() -> None:
    numbers = torch.arange(40.0)
    for first, length in ((0, 40), (1, 39), (3, 2), (5, 1), (7, 0)):
        part = numbers[first : first + length]
        assert _checksum(part) == _checksum(part.clone())
        if length:
            assert _checksum(part) != _checksum(part + 1)
