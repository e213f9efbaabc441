"""What every kind of device has, by the module that torch has for it: `torch.cuda`, `torch.npu` and so on."""

from __future__ import annotations

import torch


def default_generator(device: torch.device) -> torch.Generator | None:
    """What random operations on `device` draw from by default; None where torch does not show it."""
    if device.type == "cpu":
        return torch.default_generator
    torch.empty(0, device=device)  # a device's generators are made with its context
    made = getattr(torch.get_device_module(device), "default_generators", ())
    return made[device.index or 0] if len(made) else None


def free_memory(device: torch.device) -> None:
    """Give memory that the device's allocator holds for later back to the system."""
    empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()
