"""Random numbers that do not depend on where a model is cut, and each device's generator."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that random operations on `device` use by default; None where torch does not expose it."""
    if device.type == "cpu":
        return torch.default_generator
    torch.empty(0, device=device)  # creates the device's context, and its generators with it
    made = getattr(torch.get_device_module(device), "default_generators", ())
    return made[device.index or 0] if len(made) else None


def free_memory(device: torch.device) -> None:
    """Return memory that the device's allocator caches to the system."""
    empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A seed from several integers, by the finaliser of SplitMix64 after each."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def generators(device: torch.device) -> list[torch.Generator]:
    """The default generators that a step on `device` may use."""
    own = default_generator(device)
    return [torch.default_generator] + ([own] if own is not None and device.type != "cpu" else [])


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """On exit, put the generators of torch, Python and NumPy back to where they were."""
    before = random_states(device)
    try:
        yield
    finally:
        set_random_states(before, device)


def random_states(device: torch.device) -> tuple[Any, ...]:
    """The states of the global generators of Python, NumPy and torch, on the CPU and on `device`, to be compared."""
    of_torch = [generator.get_state().numpy().tobytes() for generator in generators(device)]
    return *python_states(), of_torch


def set_random_states(states: tuple[Any, ...], device: torch.device) -> None:
    """Set them to what they were, or to those of another rank."""
    *of_python, of_torch = states
    set_python_states(*of_python)
    for generator, state in zip(generators(device), of_torch, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def python_states() -> tuple[Any, Any]:
    """The states of the global generators of Python and NumPy, to be compared."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    assert isinstance(keys, numpy.ndarray)
    return random.getstate(), (kind, keys.tobytes(), *rest)


def set_python_states(python: Any, of_numpy: Any) -> None:
    kind, keys, *rest = of_numpy
    random.setstate(python)
    numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


KEY = "device_random_state"
"""The key in a checkpoint under which the default generator's state is (uint8, on the CPU), by type of device."""


def add_random_state(checkpoint: dict[str, Any], device: torch.device) -> None:
    """Add the state of `device`'s generator to a checkpoint; not for the CPU, whose state Lightning leaves out.

    What a pipeline's steps draw does not depend on it. What hooks draw does, and there all ranks have the same state,
    so that of one rank is enough.
    """
    generator = default_generator(device) if device.type != "cpu" else None
    if generator is not None:
        checkpoint[KEY] = {device.type: generator.get_state()}


def restore_random_state(checkpoint: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state of `device`'s generator, if the run that wrote `checkpoint` had the same type of device."""
    state = checkpoint.get(KEY, {}).get(device.type)
    generator = default_generator(device) if state is not None else None
    if generator is not None:
        generator.set_state(state.cpu())
