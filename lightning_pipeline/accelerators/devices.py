"""The Trainer's argument `devices`, for NPUs."""

from __future__ import annotations

import os

import torch.distributed as dist

from lightning_pipeline.accelerators.availability import VISIBLE

FORMS = 'a number of devices, a list of their numbers such as [0, 1] or "0,1", or -1 or "auto" for all'


def parse_devices(devices: int | str | list[int] | tuple[int, ...], num_visible: int) -> list[int]:
    """The numbers of the devices that are meant, ascending from 0 among the visible ones.

    ``2`` is the first two, ``"0,1"`` and ``[0, 1]`` name them, ``-1`` and ``"auto"`` are all. Numbers count what
    ASCEND_RT_VISIBLE_DEVICES leaves visible. Where it leaves each process of torchrun one device, that one is number 0
    in each of them, however many are asked for.

    Args:
        num_visible: number of visible devices; 0 where no NPU can be used, and then numbers are not compared with it.

    Raises:
        ValueError: `devices` has another form, or names a device twice, or one that is not there.
    """
    numbers = _numbers(devices, num_visible)
    if not numbers or any(number < 0 for number in numbers):
        raise ValueError(f"devices={devices!r} names no device: give {FORMS}; {num_visible} are visible")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"devices={devices!r} names a device twice: give each rank one of its own")
    if num_visible == 1 and "," not in os.environ.get(VISIBLE, ",") and dist.is_torchelastic_launched():
        return [0] * len(numbers)
    if num_visible and max(numbers) >= num_visible:
        visible = os.environ.get(VISIBLE)
        because = f" by {VISIBLE}={visible!r}" if visible is not None else ""
        raise ValueError(f"devices={devices!r} needs NPU {max(numbers)}, and {num_visible} are visible{because}")
    return numbers


def _numbers(devices: object, num_visible: int) -> list[int]:
    meant = _from_text(devices) if isinstance(devices, str) else devices
    if type(meant) is int:
        return list(range(num_visible if meant == -1 else meant))
    if isinstance(meant, (list, tuple)) and all(type(number) is int for number in meant):
        return list(meant)
    raise ValueError(f"devices={devices!r} is not understood: give {FORMS}")


def _from_text(text: str) -> int | list[int] | str:
    """What the text stands for, or the text where it stands for nothing."""
    if text.strip() == "auto":
        return -1
    try:
        return [int(part) for part in text.split(",") if part.strip()] if "," in text else int(text)
    except ValueError:
        return text
