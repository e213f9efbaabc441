"""What each rank of these tests starts with."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.launching import PATIENCE_S

TIMEOUT = timedelta(seconds=PATIENCE_S)


def connect() -> tuple[int, torch.device]:
    """The default process group over HCCL and Gloo. Returns this rank and its device."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("npu", rank)
    torch.npu.set_device(device)
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,npu:hccl", rank=rank, world_size=world, timeout=TIMEOUT)
    return rank, device
