"""Makes NPUs known to Lightning and to torch's files."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipeline.accelerators.availability import DEVICE
from lightning_pipeline.accelerators.lightning_private import choose_strategy_of_one_device
from lightning_pipeline.accelerators.npu import NPUAccelerator
from lightning_pipeline.accelerators.single_npu import SingleNPUStrategy

_AFTER_TORCH = 100  # torch's own kinds of storage have priorities up to 30


def register_npu() -> None:
    """``accelerator="npu"``, ``strategy="single_npu"``, which is its default on one device, and files from NPUs."""
    NPUAccelerator.register_accelerators(AcceleratorRegistry)
    SingleNPUStrategy.register_strategies(StrategyRegistry)
    choose_strategy_of_one_device(NPUAccelerator, SingleNPUStrategy)
    torch.serialization.register_package(_AFTER_TORCH, lambda storage: None, _in_host_memory)


def _in_host_memory(storage: Any, location: str) -> Any:
    """Where torch does not know NPUs, read what was on one into host memory, as Lightning does for its own devices."""
    return storage if location.partition(":")[0] == DEVICE and not hasattr(torch, DEVICE) else None
