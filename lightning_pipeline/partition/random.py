"""Random numbers that do not depend on where a model is cut.

Each micro-batch starts from a seed of its own, on every stage alike, and each module that itself draws random numbers
gets a stream of its own, from its name and the number of its call; the stream around it goes on afterwards as if
nothing had been drawn. A module's numbers thus depend on no other module, hence not on what runs on which stage.
"""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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


class Streams:
    """The random streams of one stage while a step runs."""

    def __init__(self, device: torch.device) -> None:
        self._generators = generators(device)
        self._seed = 0
        self._frames: list[list[Any]] = []
        self.counts: dict[str, int] = {}
        """How often each drawing module was called in this micro-batch."""
        self.drawing: set[str] = set()
        """Names of the modules that were seen to draw."""
        self._python_draws = False
        self._python_states: tuple[Any, ...] = ()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Everything drawn inside leaves the generators as they were."""
        states = self._states()
        python_state, numpy_state = _python_states()
        try:
            yield
        finally:
            self._restore(states)
            random.setstate(python_state)
            if numpy_state is not None:
                sys.modules["numpy"].random.set_state(numpy_state)

    def begin(self, seed: int, *, observing: bool) -> None:
        """Start a micro-batch. `observing`: find out who draws."""
        self._seed = seed
        self.counts = {}
        self._frames = []
        for generator in self._generators:
            generator.manual_seed(seed)
        if observing or self._python_draws:
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
        if observing:
            self._python_states = _python_states()
            self._enter_frame("")

    def end_observed(self) -> None:
        """After an observed micro-batch: whether Python's or NumPy's generator was drawn from."""
        self._python_draws |= pickle.dumps(self._python_states) != pickle.dumps(_python_states())

    def own(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of module `name`, on a stream of its own."""
        tag = zlib.crc32(name.encode())

        def with_own_stream(*args: Any, **kwargs: Any) -> Any:
            states = self._next_stream(name, tag)
            try:
                return forward(*args, **kwargs)
            finally:
                self._restore(states)

        return with_own_stream

    def observed(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """As `own`, and find out whether the module itself draws."""
        tag = zlib.crc32(name.encode())

        def with_observed_stream(*args: Any, **kwargs: Any) -> Any:
            self._look()
            states = self._next_stream(name, tag)
            self._enter_frame(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._look()
                self._frames.pop()
                self._restore(states)

        return with_observed_stream

    def snapshot(self) -> tuple[int, dict[str, int]]:
        """Where the streams are, for a later `resumed`."""
        return self._seed, dict(self.counts)

    @contextmanager
    def resumed(self, snapshot: tuple[int, dict[str, int]]) -> Iterator[None]:
        """Draw as after `snapshot`: for the recomputation of a checkpointed part during backward."""
        now = self._seed, self.counts, self._frames
        self._seed, self.counts, self._frames = snapshot[0], dict(snapshot[1]), []
        self._enter_frame("")
        try:
            yield
        finally:
            self._seed, self.counts, self._frames = now

    def moved(self, states: list[Tensor]) -> bool:
        """Whether anything was drawn since `states` were read."""
        with torch._C.DisableTorchFunction():  # numpy compares, as a tensor operation would be seen as the model's
            pairs = zip(states, self._states(), strict=True)
            return any(before.numpy().tobytes() != now.numpy().tobytes() for before, now in pairs)

    def states(self) -> list[Tensor]:
        """The generators' states, to compare with `moved`."""
        return self._states()

    def _next_stream(self, name: str, tag: int) -> list[Tensor]:
        states = self._states()
        call = self.counts.get(name, 0)
        self.counts[name] = call + 1
        self._plant(mix(self._seed, tag, call))
        return states

    def _enter_frame(self, name: str) -> None:
        self._frames.append([name, self._states()])

    def _look(self) -> None:
        if self._frames:
            frame = self._frames[-1]
            if self.moved(frame[1]):
                self.drawing.add(frame[0])
                frame[1] = self._states()

    def _plant(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _restore(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _python_states() -> tuple[Any, Any]:
    """The states of Python's and, where it is imported, NumPy's default generator."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None
