"""Random numbers that do not depend on where a model is cut: each draw of a micro-batch has a seed of its own."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_pipeline.partition.devices import default_generator

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
