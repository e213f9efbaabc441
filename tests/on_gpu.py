"""Lets the ranks of a test share a GPU.

They do where there are fewer than ranks. With TESTS_ON=cuda, those tests train on it that ask for the CPU, as most do.

NCCL refuses two ranks of one host on one GPU. So each rank says that it is on a host of its own, and they talk over
sockets. What such runs show is that values are right and nothing waits for ever; they say nothing about speed.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from lightning_pipeline import PipelineStrategy

IS_ASKED = os.environ.get("TESTS_ON") == "cuda"
BACKEND = os.environ.get("TESTS_BACKEND")
"""Such as "gloo", over which tensors go by way of the CPU."""
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def is_shared(world: int) -> bool:
    """Whether so many ranks share a GPU, if they train on one."""
    return IS_ASKED or 1 <= torch.cuda.device_count() < world


def share(rank: int) -> None:
    """Have the Trainers of this process train on the first GPU, as those of the other ranks."""
    os.environ.update(ENVIRONMENT, NCCL_HOSTID=f"host-of-rank-{rank}")
    mock.patch.object(CUDAAccelerator, "parse_devices", parse_devices).start()
    mock.patch.object(CUDAAccelerator, "get_parallel_devices", get_parallel_devices).start()
    if IS_ASKED:
        with_arguments(L.Trainer, on_gpu)
    if BACKEND is not None:
        with_arguments(PipelineStrategy, over_backend)


def parse_devices(devices: Any) -> list[int]:
    return list(range(devices)) if isinstance(devices, int) else [0]


def get_parallel_devices(devices: list[int]) -> list[torch.device]:
    return [torch.device("cuda", 0) for _ in devices]


def on_gpu(arguments: dict[str, Any]) -> None:
    if arguments.get("accelerator") == "cpu":
        arguments["accelerator"] = "cuda"


def over_backend(arguments: dict[str, Any]) -> None:
    arguments.setdefault("process_group_backend", BACKEND)


def with_arguments(made: type, change: Any) -> None:
    """Change the arguments with which objects of a class are made."""
    original = made.__init__

    def __init__(self: Any, *args: Any, **arguments: Any) -> None:
        change(arguments)
        original(self, *args, **arguments)

    mock.patch.object(made, "__init__", __init__).start()
