"""NPUAccelerator: Ascend NPUs, by torch_npu."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from typing_extensions import override

from lightning_pipeline.accelerators.availability import (
    DEVICE,
    VISIBLE,
    NPUUnavailableError,
    is_installed,
    npu_module,
    why_unavailable,
)
from lightning_pipeline.accelerators.devices import parse_devices

from .._lightning import Accelerator, DDPStrategy, Trainer, rank_zero_warn
from .lightning_private import silence_scaler_warning

log = logging.getLogger(__name__)


class NPUAccelerator(Accelerator):
    """Ascend NPUs: ``Trainer(accelerator="npu")``, with strategy "pipeline", or "single_npu" on one device.

    torch_npu is imported when an NPU is asked for, not before. Lightning's ``accelerator="auto"`` has a list of its own
    and never chooses NPUs: name them.

    Args:
        required: raise at once where no NPU can be used, and say why. ``accelerator="npu"`` sets it, as the Trainer
            itself would only say that the accelerator is not available.

    Raises:
        NPUUnavailableError: no NPU can be used; the message says what to install or set.
    """

    def __init__(self, *, required: bool = False) -> None:
        silence_scaler_warning()
        if required and (reason := why_unavailable()) is not None:
            raise NPUUnavailableError(reason)

    @override
    def setup_device(self, device: torch.device) -> None:
        """Make `device` this process's.

        Raises:
            ValueError: a device of another kind.
            RuntimeError: the process was forked from one that had used an NPU.
        """
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
        """Before training, validation, test or prediction.

        Raises:
            ValueError: the strategy is one that needs CUDA.
        """
        # DDPStrategy makes CUDA streams. Where they are there all the same, somebody has mapped CUDA's names to NPUs.
        if isinstance(trainer.strategy, DDPStrategy) and not torch.cuda.is_available():
            raise ValueError(
                "DDPStrategy works on CUDA's streams, which NPUs do not have: strategy=PipelineStrategy(num_stages=1) "
                "trains one replica on each device"
            )
        log.info(f"LOCAL_RANK: {trainer.local_rank} - {VISIBLE}: {os.environ.get(VISIBLE, 'all')}")
        self._free_memory()

    @override
    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Figures of torch_npu's memory allocator by name, bytes or counts: what `DeviceStatsMonitor` logs."""
        return dict(npu_module().memory_stats(device))

    @override
    def teardown(self) -> None:
        self._free_memory()

    @staticmethod
    @override
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Numbers of the devices that the Trainer's `devices` means, among the visible ones (see `devices`)."""
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
        """Whether an NPU can be used; a torch_npu that is installed and cannot is as good as none, and logs why."""
        reason = why_unavailable()
        if reason is not None and is_installed():
            log.warning(reason)
        return reason is None

    @staticmethod
    @override
    def name() -> str:
        return DEVICE

    @staticmethod
    def _free_memory() -> None:
        npu_module().empty_cache()


def warn_of_unused_npus(device: torch.device) -> None:
    """``accelerator="auto"`` is no choice of the user's, and does not look for NPUs. Does not import torch_npu."""
    if device.type == "cpu" and hasattr(torch, DEVICE) and why_unavailable() is None:
        rank_zero_warn(
            'NPUs are available and not used: accelerator="auto" never chooses them; pass Trainer(accelerator="npu")'
        )
