"""The random state of a micro-batch's draws, and the user's random state while the engine works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_pipeline import _torch
from lightning_pipeline.partition.rng import generators, mix
from lightning_pipeline.partition.torch_functions import FunctionKind, drawn_into, is_drawing_of_own, kind_of
from lightning_pipeline.recording.matcher import autocast_state
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.new_events import refuse_drawn_weights
from lightning_pipeline.recording.patched_checkpoint import checkpoints_wrapped
from lightning_pipeline.recording.scripted import scripted_seen


class Draws:
    """The global generators of torch that a step on `device` may draw from.

    Attributes:
        replicated: the module's tensors if there are other replicas, which draw other numbers; else None.
    """

    def __init__(self, device: torch.device) -> None:
        self.replicated: ModuleTensors | None = None
        self._generators = generators(device)

    def seed(self, microbatch: int, number: int) -> None:
        """Seed the generators for one random draw.

        Args:
            microbatch: seed of the micro-batch.
            number: number of the draw in the micro-batch.
        """
        seed = mix(microbatch, number)
        for generator in self._generators:
            generator.manual_seed(seed)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators' states on exit."""
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


class CountedDraws(TorchFunctionMode):
    """Counts and seeds the random draws of a micro-batch whose step runs directly, without recording.

    A checkpointed function draws the same numbers again when it is recomputed.
    """

    def __init__(self, draws: Draws, microbatch: int) -> None:
        super().__init__()
        self._draws = draws
        self._microbatch = microbatch
        self.number = 0
        self._is_entered = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Entered while the user's step runs."""
        with self.resumed(), self:
            yield

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Entered while the user's step, or a part of it, runs: patches torch's checkpointing for the process."""
        self._is_entered = True
        try:
            with checkpoints_wrapped(self._resumed), scripted_seen(self._scripted, in_stages=False):
                yield
        finally:
            self._is_entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind_of(func) is FunctionKind.DRAWS and not is_drawing_of_own(kwargs or {}):
            if self._draws.replicated is not None:
                refuse_drawn_weights(self._draws.replicated, func, drawn_into(func, args, kwargs))
            self._draws.seed(self._microbatch, self.number)
            self.number += 1
        return func(*args, **(kwargs or {}))

    def _scripted(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_active = any(mode is self for mode in _torch.function_modes())
        return self.__torch_function__(function, (), args, kwargs) if is_active else function(*args, **kwargs)

    def _resumed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        first = self.number

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.number = self.number, first
            try:
                with self._active():
                    return function(*args, **kwargs)
            finally:
                self.number = before

        return run

    def _active(self) -> AbstractContextManager[Any]:
        """Entered around what computes again, so that draws are seen: in backward, after the step, and where the step
        itself takes gradients, which torch runs without the mode."""
        if not self._is_entered:
            return self.running()
        return nullcontext() if any(mode is self for mode in _torch.function_modes()) else self


@contextmanager
def set_aside() -> Iterator[None]:
    """Reset torch's state to that outside of the step: no modes, autograd enabled, no autocast."""
    modes = []
    while _torch.num_function_modes():
        modes.append(_torch.pop_function_mode())
    autocast = autocast_state()
    try:
        with ExitStack() as stack:
            for kind, *_ in autocast or ():
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.set_grad_enabled(True))
            yield
    finally:
        while modes:
            _torch.push_function_mode(modes.pop())
