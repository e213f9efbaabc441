"""Random numbers that do not depend on where a model is cut, and each device's generator."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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


_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A seed from several whole numbers (the finaliser of SplitMix64 after each)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def generators(device: torch.device) -> list[torch.Generator]:
    """The default generators that a step on `device` may draw from."""
    own = default_generator(device)
    return [torch.default_generator] + ([own] if own is not None and device.type != "cpu" else [])


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Everything drawn inside leaves the generators of torch, Python and NumPy as they were."""
    own = [(generator, generator.get_state()) for generator in generators(device)]
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        for generator, state in own:
            generator.set_state(state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


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
