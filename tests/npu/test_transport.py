"""Our transport on the real ProcessGroupHCCL."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport
from tests.launching import launch
from tests.npu.ranks import connect
from tests.runtime import test_transport as shared


def transport(num_stages: int, body: str) -> None:
    rank, device = connect()
    topology = Topology(num_ranks_per_pipeline=num_stages, world_size=dist.get_world_size(), rank=rank)
    t = Transport(topology, device, timedelta(seconds=30), dist.distributed_c10d._get_default_store())
    getattr(shared, body)(t)
    t.close()
    dist.destroy_process_group()


def test_two() -> None:
    launch(transport, 2, "exchange", world=2)


def test_three() -> None:
    launch(transport, 3, "exchange", world=3)
