"""NPUAccelerator: Ascend NPUs through torch_npu, and the Trainer's `devices` for them."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_pipeline.accelerators.availability import (
    DEVICE,
    VISIBLE,
    NPUUnavailableError,
    is_installed,
    npu_module,
    why_unavailable,
)

from .._lightning import Accelerator, DDPStrategy, Trainer, rank_zero_warn

log = logging.getLogger(__name__)

FORMS = 'a number of devices, a list of their numbers such as [0, 1] or "0,1", or -1 or "auto" for all'


def parse_devices(devices: int | str | list[int] | tuple[int, ...], num_visible: int) -> list[int]:
    """The numbers of the devices that the Trainer's `devices` asks for.

    ``2`` is the first two, ``"0,1"`` and ``[0, 1]`` name them, ``-1`` and ``"auto"`` are all. Numbers count the devices
    that ASCEND_RT_VISIBLE_DEVICES leaves visible, from 0. If it leaves each process of torchrun one device, that is
    number 0 in every process, however many are asked for.

    Args:
        num_visible: number of visible devices; 0 if no NPU can be used, and then any number is accepted.

    Raises:
        ValueError: `devices` has another form, or names a device twice, or one that does not exist.
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
    parsed = devices
    if isinstance(devices, str):
        with suppress(ValueError):
            is_list = "," in devices
            text = "-1" if devices.strip() == "auto" else devices
            parsed = [int(part) for part in text.split(",") if part.strip()] if is_list else int(text)
    if type(parsed) is int:
        return list(range(num_visible if parsed == -1 else parsed))
    if isinstance(parsed, (list, tuple)) and all(type(number) is int for number in parsed):
        return list(parsed)
    raise ValueError(f"devices={devices!r} is not understood: give {FORMS}")


class NPUAccelerator(Accelerator):
    """Ascend NPUs: ``Trainer(accelerator="npu")``, with strategy "pipeline", or "single_npu" on one device.

    torch_npu is imported when an NPU is asked for, not before. Lightning's ``accelerator="auto"`` has a list of its own
    and never chooses NPUs.

    Args:
        required: raise at once if no NPU can be used, and say why. ``accelerator="npu"`` sets it, as the Trainer itself
            would only say that the accelerator is not available.

    Raises:
        NPUUnavailableError: no NPU can be used; the message says what to install or set.
    """

    def __init__(self, *, required: bool = False) -> None:
        # Whatever the accelerator, Lightning first makes a loss scaler for CUDA, which `fit_to_device` replaces.
        warnings.filterwarnings("ignore", message=r"torch\.cuda\.amp\.GradScaler is enabled, but CUDA is not available")
        if required and (reason := why_unavailable()) is not None:
            raise NPUUnavailableError(reason)

    @override
    def setup_device(self, device: torch.device) -> None:
        """Make `device` the device of this process."""
        if device.type != DEVICE:
            raise ValueError(
                f'accelerator="npu" was given the device {device}, which Lightning chooses where the strategy does not '
                f'say otherwise: pass strategy="single_npu" for one device or strategy="pipeline" for several'
            )
        module: Any = npu_module()
        if module._is_in_bad_fork():
            raise RuntimeError(
                "this process was forked from one that had used an NPU, whose state does not survive that: start "
                'processes by torchrun or strategy="pipeline", which run the script again, or with '
                'multiprocessing\'s start method "spawn"'
            )
        module.set_device(device)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Called before training, validation, test or prediction."""
        # DDPStrategy makes CUDA streams. If CUDA is available all the same, torch_npu has mapped its names to NPUs.
        if isinstance(trainer.strategy, DDPStrategy) and not torch.cuda.is_available():
            raise ValueError(
                "DDPStrategy works on CUDA's streams, which NPUs do not have: strategy=PipelineStrategy(num_stages=1) "
                "trains one replica on each device"
            )
        log.info(f"LOCAL_RANK: {trainer.local_rank} - {VISIBLE}: {os.environ.get(VISIBLE, 'all')}")
        npu_module().empty_cache()

    @override
    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Statistics of torch_npu's memory allocator (bytes or counts) by name, for `DeviceStatsMonitor`."""
        return dict(npu_module().memory_stats(device))

    @override
    def teardown(self) -> None:
        npu_module().empty_cache()

    @staticmethod
    @override
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        return parse_devices(devices, NPUAccelerator.auto_device_count())

    @staticmethod
    @override
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        npu_module()  # without it torch does not know the name
        return [torch.device(DEVICE, index) for index in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        """Number of visible NPUs."""
        return npu_module().device_count() if why_unavailable() is None else 0

    @staticmethod
    @override
    def is_available() -> bool:
        """Whether an NPU can be used; if torch_npu is installed and unusable, logs why."""
        reason = why_unavailable()
        if reason is not None and is_installed():
            log.warning(reason)
        return reason is None

    @staticmethod
    @override
    def name() -> str:
        return DEVICE


def warn_of_unused_npus(device: torch.device) -> None:
    """Warn if ``accelerator="auto"`` has chosen the CPU beside an NPU. Does not import torch_npu."""
    if device.type == "cpu" and hasattr(torch, DEVICE) and why_unavailable() is None:
        rank_zero_warn(
            'NPUs are available and not used: accelerator="auto" never chooses them; pass Trainer(accelerator="npu")'
        )
