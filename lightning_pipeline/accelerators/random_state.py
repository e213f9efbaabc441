"""A device's random state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_pipeline.partition.devices import default_generator

KEY = "device_random_state"
"""In a checkpoint: the state of the default generator (uint8, in host memory), by kind of device."""


def add_random_state(checkpoint: dict[str, Any], device: torch.device) -> None:
    """Add what random operations on `device` would draw next; nothing for the CPU, whose state Lightning leaves out.

    What a pipeline's steps draw does not depend on it. What hooks draw does, and all ranks hold the same state there,
    so one is enough.
    """
    generator = default_generator(device) if device.type != "cpu" else None
    if generator is not None:
        checkpoint[KEY] = {device.type: generator.get_state()}


def restore_random_state(checkpoint: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing where the run that wrote `checkpoint` stopped, if it ran on the same kind of device."""
    state = checkpoint.get(KEY, {}).get(device.type)
    generator = default_generator(device) if state is not None else None
    if generator is not None:
        generator.set_state(state.cpu())
