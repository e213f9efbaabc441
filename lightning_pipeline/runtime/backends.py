"""Which backends carry what: tensors go over the device's own, objects and host memory over Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

HOST = dist.Backend.GLOO


def backend_for(device: torch.device, asked: str | None = None) -> str:
    """The default process group's backend for tensors on `device`, such as ``"cpu:gloo,npu:hccl"``; "gloo" on the CPU.

    The device alone decides: torch keeps a map from devices to backends, to which torch_npu adds HCCL. Objects need
    host memory, which HCCL and NCCL do not take, so such a group has both.

    Args:
        asked: a backend that the user names; ``"device:backend"`` pairs are taken as they are.

    Raises:
        RuntimeError: torch knows no backend for the device.
        ValueError: the one that is asked for does not take the device's tensors.
    """
    if asked is not None and ":" in asked:
        return asked
    backend = asked or dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        raise RuntimeError(
            f"torch knows no backend for tensors on {device}: the package that adds the device has to be imported "
            f"(torch_npu adds hccl), or name one as PipelineStrategy(process_group_backend=...)"
        )
    if device.type not in dist.Backend.backend_capability.get(backend.lower(), [device.type]):
        default = dist.Backend.default_device_backend_map.get(device.type)
        raise ValueError(
            f"process_group_backend={asked!r} does not take tensors on {device}: leave it out, and {default} is used"
        )
    return backend if backend == HOST else f"cpu:{HOST},{device.type}:{backend}"
