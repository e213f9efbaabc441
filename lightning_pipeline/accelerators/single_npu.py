"""Strategy "single_npu": one NPU without a pipeline, and mixed precision on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_pipeline.accelerators.availability import DEVICE
from lightning_pipeline.partition.rng import add_random_state, free_memory, restore_random_state

from .._lightning import (
    Accelerator,
    CheckpointIO,
    MixedPrecision,
    Precision,
    SingleDeviceStrategy,
    _AcceleratorConnector,
)
from .npu import NPUAccelerator


def fit_to_device(plugin: Precision | None, device_type: str) -> None:
    """Make a precision plugin serve `device_type`: for accelerators not its own, Lightning makes it for CUDA."""
    if isinstance(plugin, MixedPrecision) and plugin.device == "cuda" != device_type:
        plugin.device = device_type
        if plugin.scaler is not None:
            plugin.scaler = _scaler(device_type)


def _scaler(device_type: str) -> torch.amp.GradScaler:
    """The device's own loss scaler, if it has one, else torch's.

    Earlier Ascend devices have no infinities; torch_npu's scaler reads their overflow flag instead.
    """
    own: Any = getattr(torch.get_device_module(device_type), "amp", None)
    if not hasattr(own, "GradScaler"):
        return torch.amp.GradScaler(device_type)
    scaler = own.GradScaler()
    load = scaler.load_state_dict

    def load_state_dict(state: dict[str, Any]) -> None:
        load({"dynamic": True, **state} if state else state)  # a key that only torch_npu's scaler saves, and needs

    vars(scaler)["load_state_dict"] = load_state_dict
    return scaler


class SingleNPUStrategy(SingleDeviceStrategy):
    """Everything on one NPU; the default of ``Trainer(accelerator="npu", devices=1)``.

    Checkpoints hold CPU tensors, so they load on machines without an NPU.

    Args:
        device: ``"npu:1"``, or a number; default: the first one that the Trainer was given.
    """

    strategy_name = "single_npu"

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self._given = device
        self._before_check: dict[str, Any] = {}
        self.parallel_devices: list[torch.device] | None = None
        """Set by the Trainer, as on all strategies that have this attribute."""

    @property
    @override
    def root_device(self) -> torch.device:
        if self._given is not None:  # not made earlier: torch knows the name "npu" once torch_npu is imported
            return torch.device(DEVICE, self._given) if isinstance(self._given, int) else torch.device(self._given)
        return self.parallel_devices[0] if self.parallel_devices else torch.device(DEVICE, 0)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        fit_to_device(precision_plugin, DEVICE)
        self._precision_plugin = precision_plugin

    @override
    def setup_environment(self) -> None:
        if self.parallel_devices and len(self.parallel_devices) > 1:
            raise ValueError(
                f'strategy="single_npu" was given {len(self.parallel_devices)} devices: use devices=1, or '
                f'strategy="pipeline" for several'
            )
        super().setup_environment()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        add_random_state(checkpoint, self.root_device)
        on_host = apply_to_collection(checkpoint, Tensor, lambda tensor: tensor.cpu())
        super().save_checkpoint(on_host, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        free_memory(self.root_device)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        restore_random_state(checkpoint, self.root_device)

    # Lightning restores the random state after the sanity check, but only that of the CPU and CUDA.

    @override
    def on_validation_start(self) -> None:
        assert self.lightning_module is not None
        self._before_check = {}
        if self.lightning_module.trainer.sanity_checking:
            add_random_state(self._before_check, self.root_device)

    @override
    def on_validation_end(self) -> None:
        restore_random_state(self._before_check, self.root_device)


def _choose_single_npu_by_default() -> None:
    """Let ``Trainer(accelerator="npu", devices=1)`` take SingleNPUStrategy.

    For any accelerator but its own, Lightning silently takes the CPU. It decides in a private method of an object that
    lives within the Trainer's constructor, so the class is patched. Read in Lightning 2.6.
    """
    choose = getattr(_AcceleratorConnector, "_choose_strategy", None)
    if choose is None or getattr(choose, "chooses_npu", False):
        return

    def choose_strategy(self: Any) -> Any:
        chosen = choose(self)
        if isinstance(self.accelerator, NPUAccelerator) and type(chosen) is SingleDeviceStrategy:
            return SingleNPUStrategy(self._parallel_devices[0])
        return chosen

    choose_strategy.chooses_npu = True  # type: ignore[attr-defined]
    _AcceleratorConnector._choose_strategy = choose_strategy  # type: ignore[method-assign]


_choose_single_npu_by_default()
