"""ProcessGroupHCCL itself, over the stand-in: what our transport has to obey."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from tests.launching import launch


def connect(backend: str = "cpu:gloo,npu:hccl") -> tuple[int, torch.device]:
    device = torch.device("npu", int(__import__("os").environ["LOCAL_RANK"]))
    torch.npu.set_device(device)
    import os

    dist.init_process_group(
        backend,
        rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=30),
    )
    return dist.get_rank(), device


def collectives() -> None:
    rank, device = connect()
    x = torch.full((3,), float(rank + 1), device=device)
    dist.all_reduce(x)
    print(rank, "allreduce", x)
    out = torch.zeros(6, device=device)
    dist.all_gather_into_tensor(out, torch.full((3,), float(rank), device=device))
    print(rank, out)
    y = torch.arange(4, device=device) * (rank + 1)
    dist.broadcast(y, 1)
    print(rank, y)
    o = torch.zeros(2, device=device)
    dist.reduce_scatter_tensor(o, torch.arange(4.0, device=device))
    print(rank, o)
    dist.barrier()
    if rank == 0:
        w = dist.isend(torch.ones(5, device=device), 1)
        w.wait()
    else:
        b = torch.zeros(5, device=device)
        w = dist.irecv(b, 0)
        w.wait()
        print("got", b)
    objs = [None, None]
    dist.all_gather_object(objs, {"rank": rank})
    print(objs)
    dist.destroy_process_group()


def test_collectives() -> None:
    launch(collectives, world=2)
