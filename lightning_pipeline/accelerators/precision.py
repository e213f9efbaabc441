"""Mixed precision on the device that there is."""

from __future__ import annotations

from typing import Any

import torch

from .._lightning import MixedPrecision, Precision


def fit_to_device(plugin: Precision | None, device_type: str) -> None:
    """Lightning makes mixed precision for CUDA on any accelerator but its own; let `plugin` serve `device_type`."""
    if isinstance(plugin, MixedPrecision) and plugin.device == "cuda" != device_type:
        plugin.device = device_type
        if plugin.scaler is not None:
            plugin.scaler = _scaler(device_type)


def _scaler(device_type: str) -> torch.amp.GradScaler:
    """The device's own scaler, where it has one. Earlier Ascend devices have no infinities, and torch_npu's scaler
    reads their overflow flag instead.
    """
    own: Any = getattr(torch.get_device_module(device_type), "amp", None)
    if not hasattr(own, "GradScaler"):
        return torch.amp.GradScaler(device_type)
    scaler = own.GradScaler()
    load = scaler.load_state_dict

    def load_of_any_device(state: dict[str, Any]) -> None:
        load({"dynamic": True, **state} if state else state)  # a key that only torch_npu's scaler has, and needs

    vars(scaler)["load_state_dict"] = load_of_any_device
    return scaler
