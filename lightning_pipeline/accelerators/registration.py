"""Makes NPUs known to Lightning and to torch's files."""

from __future__ import annotations

from lightning_pipeline.accelerators.availability import read_files_of_npus

from .._lightning import AcceleratorRegistry, StrategyRegistry
from .lightning_private import choose_strategy_of_one_device
from .npu import NPUAccelerator
from .single_npu import SingleNPUStrategy


def register_npu() -> None:
    """``accelerator="npu"``, ``strategy="single_npu"``, which is its default on one device, and files from NPUs."""
    NPUAccelerator.register_accelerators(AcceleratorRegistry)
    SingleNPUStrategy.register_strategies(StrategyRegistry)
    choose_strategy_of_one_device(NPUAccelerator, SingleNPUStrategy)
    read_files_of_npus()
