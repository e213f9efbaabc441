"""Our transport on the real ProcessGroupHCCL, and what becomes of it where it does not obey the rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.topology import Channel, Topology
from lightning_pipeline.runtime.transport import Transport
from tests.launching import launch, run_ranks
from tests.npu import stand_in
from tests.npu.ranks import TIMEOUT, connect
from tests.runtime.test_transport import check_equal, examples

FORWARD, BACKWARD = Channel.FORWARD, Channel.BACKWARD


def transport() -> Transport:
    """A stage on each rank, and routes in a loop, as virtual stages have them."""
    rank, device = connect()
    stages = dist.get_world_size()
    topology = Topology(num_ranks_per_pipeline=stages, world_size=stages, rank=rank)
    topology = topology.along([*range(stages), *range(stages)])
    return Transport(topology, device, TIMEOUT, dist.distributed_c10d._get_default_store())


def exchange(connection: Transport) -> None:
    """Every kind of tensor around the loop and its mirror against it, at once; receives are posted first."""
    stages, device = connection.topology.num_stages, connection.device
    following, before = (connection.stage + 1) % stages, (connection.stage - 1) % stages
    kinds = [tensor.to(device) for tensor in examples()]
    metas = [TensorMeta.of(tensor) for tensor in kinds]
    ups = [connection.recv(meta, before, FORWARD) for meta in metas]
    downs = [connection.recv(meta, following, BACKWARD) for meta in metas]
    for tensor in kinds:
        connection.send(tensor, following, FORWARD)
        connection.send(tensor, before, BACKWARD)
    for pending in (ups, downs):
        for handle, sent in zip(pending, kinds, strict=True):
            received = handle.wait("an example")
            assert received.device == device
            check_equal(received.cpu(), sent.cpu())
    connection.flush()


def in_order() -> None:
    connection = transport()
    exchange(connection)
    connection.send_object({"from": connection.stage}, (connection.stage + 1) % connection.topology.num_stages)
    before = (connection.stage - 1) % connection.topology.num_stages
    assert connection.recv_object(before, "an object") == {"from": before}
    connection.close()


@pytest.mark.parametrize("stages", [2, 3])
def test_exchange(stages: int) -> None:
    launch(in_order, world=stages)


def first_uses_of_each_rank() -> None:
    """Each rank connects its own sends first: a ring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HCCL_CONNECT_TIMEOUT", "3")
        patch.setattr(
            "lightning_pipeline.runtime.transport.first_uses",
            lambda routes: sorted(routes, key=lambda r: r.source != dist.get_rank()),
        )
        transport()


def one_group_for_all() -> None:
    """Both directions of a channel, and all channels, in one group: receives that were posted first block the sends."""
    groups: dict[str, dist.ProcessGroup] = {}
    new_group = Transport._new_group

    def first_group(self: Transport, backend: str) -> dist.ProcessGroup:
        return groups.setdefault(backend, groups.get(backend) or new_group(self, backend))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "_new_group", first_group)
        exchange(transport())


def complaint_of(body: Callable[[], None]) -> str:
    """What the stand-in says of a body that fails; those that fail for others' sake hear nothing."""
    with pytest.raises(RuntimeError):
        body()
    return stand_in.last_errors()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (first_uses_of_each_rank, "its first use comes in different orders"),
        (one_group_for_all, "in different orders on"),
    ],
)
def test_wrong_orders_are_caught(body: Callable[[], None], told: str) -> None:
    ended = run_ranks(complaint_of, body, world=3)
    assert any("deadlock" in str(end.value) and told in str(end.value) for end in ended), ended
