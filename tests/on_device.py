"""Lets tests that ask for the CPU train on another device: `TESTS_ON=cuda pytest tests/training`, or `npu`.

On "npu" it is the simulated one, for which .venv-npu is made by `make test-npu`. On "cuda" all ranks may share one GPU,
as they do in all tests where there are fewer GPUs than ranks. NCCL refuses two ranks of one host on one GPU, so each
rank says that it is on a host of its own, and they talk over sockets. What such runs show is that values are right and
that nothing waits for ever; they say nothing about speed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

DEVICE = os.environ.get("TESTS_ON", "cpu")
BACKEND = os.environ.get("TESTS_BACKEND")
"""Such as "gloo", over which tensors go by way of the CPU."""
OF_NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_NCHANNELS": "1"}


def prepare(preloaded: list[str]) -> None:
    """Make what ranks need, in the process that launches them. Adds to the modules that they have imported already."""
    if DEVICE == "npu":
        from tests.npu import stand_in

        os.environ["CANN_STAND_IN"] = str(stand_in.build(Path(__file__).parents[1] / "build" / "cann"))
        preloaded.insert(0, "tests.npu.preloaded")


def use(rank: int, world: int) -> None:
    """Have the Trainers of this rank train on the device."""
    if DEVICE == "cuda" or 1 <= torch.cuda.device_count() < world:
        share_the_gpu(rank)
    if DEVICE != "cpu":
        import lightning as L

        with_arguments(L.Trainer, on_device)
    if BACKEND is not None:
        from lightning_pipeline import PipelineStrategy

        with_arguments(PipelineStrategy, over_backend)


def share_the_gpu(rank: int) -> None:
    from lightning.pytorch.accelerators import CUDAAccelerator

    os.environ.update(OF_NCCL, NCCL_HOSTID=f"host-of-rank-{rank}", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    mock.patch.object(CUDAAccelerator, "parse_devices", parse_devices).start()
    mock.patch.object(CUDAAccelerator, "get_parallel_devices", get_parallel_devices).start()


def parse_devices(devices: Any) -> list[int]:
    return list(range(devices)) if isinstance(devices, int) else [0]


def get_parallel_devices(devices: list[int]) -> list[torch.device]:
    return [torch.device("cuda", 0) for _ in devices]


def on_device(arguments: dict[str, Any]) -> None:
    if arguments.get("accelerator") == "cpu":
        arguments["accelerator"] = DEVICE


def over_backend(arguments: dict[str, Any]) -> None:
    arguments.setdefault("process_group_backend", BACKEND)


def with_arguments(made: type, change: Any) -> None:
    """Change the arguments with which objects of a class are made."""
    original = made.__init__

    def __init__(self: Any, *args: Any, **arguments: Any) -> None:
        change(arguments)
        original(self, *args, **arguments)

    mock.patch.object(made, "__init__", __init__).start()


def generator_states() -> dict[str, Any]:
    """Those of the device's own generators."""
    if DEVICE == "cpu":
        return {}
    return {DEVICE: torch.get_device_module(DEVICE).get_rng_state().numpy()}
