"""The random state of a micro-batch's draws, and the user's random state while the engine works."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline import _torch
from lightning_pipeline.partition.rng import generators, mix
from lightning_pipeline.partition.torch_functions import FunctionKind, drawn_into, is_drawing_of_own, kind_of
from lightning_pipeline.recording.matcher import autocast_state
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.new_events import refuse_drawn_weights
from lightning_pipeline.recording.patched_checkpoint import checkpoints_wrapped
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.recording.scripted import scripted_seen
from lightning_pipeline.recording.step_gradients import GRADIENT_CALLS, UNANSWERED, StepGradients

_SEEDED, _WITHIN = 1 << 62, 20
"""From the first number on, draws follow a seed or state that a step has set, a million times each."""
_MAX_STATES = 10_000


class _States:
    """The generator's states that steps have taken.

    Attributes:
        by_content: how the step seeds, and the number of its next draw then.
        by_number: the same, of those that another micro-batch has set.
    """

    def __init__(self) -> None:
        self.by_content: OrderedDict[bytes, tuple[Callable[[int], None], int]] = OrderedDict()
        self.by_number: OrderedDict[int, tuple[Callable[[int], None], int]] = OrderedDict()


_states = _States()


class GeneratorInSteps:
    """Torch's default generator, as the functions of `torch.random` have it during a run.

    Draws of a step are seeded by their numbers. So a state is a number, and to set a state or a seed in a step is to go
    on with another number. Outside of steps it is the generator itself.
    """

    def get_state(self) -> Tensor:
        step = _running()
        if step is None:
            return torch.default_generator.get_state()
        with _torch.DisableTorchFunction():
            step.seed_draw(step.num_draws)
            state = torch.default_generator.get_state()
            _keep(_states.by_content, _content(state), (step.seed_draw, step.num_draws))
        return state

    def set_state(self, state: Tensor) -> torch.Generator:
        step = _running()
        if step is None:
            return torch.default_generator.set_state(state)
        with _torch.DisableTorchFunction():
            content = _content(state)
            number = _number_of(zlib.crc32(content))
            if (found := _states.by_content.get(content)) is not None:
                _keep(_states.by_content, content, found)
                step.seed_draw(found[1])
                if _content(torch.default_generator.get_state()) == content:  # it is this micro-batch's own
                    number = found[1]
                else:
                    _keep(_states.by_number, number, found)
        step.num_draws = number
        return torch.default_generator

    def manual_seed(self, seed: int) -> torch.Generator:
        step = _running()
        if step is None:
            return torch.default_generator.manual_seed(seed)
        step.num_draws = _number_of(seed)
        return torch.default_generator

    def initial_seed(self) -> int:
        step = _running()
        if step is not None:
            step.seed_draw(step.num_draws)
        return torch.default_generator.initial_seed()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)


def forget_states() -> None:
    """Forget the generator's states that steps of a run have taken."""
    _states.by_content.clear()
    _states.by_number.clear()


def _content(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _keep(states: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    states[key] = value
    states.move_to_end(key)
    if len(states) > _MAX_STATES:
        states.popitem(last=False)


def _number_of(seed: int) -> int:
    """The number of the first draw after a seed is set."""
    return _SEEDED | (mix(seed) & ((1 << 40) - 1)) << _WITHIN


def _running() -> CountedDraws | Recording | None:
    """What counts the draws of the step that runs, if any."""
    modes = reversed(_torch.function_modes())
    return next((mode for mode in modes if isinstance(mode, (CountedDraws, Recording))), None)


class Draws:
    """The global generators of torch that a step on `device` may draw from.

    Attributes:
        replicated: the module's tensors if there are other replicas, which draw other numbers; else None.
    """

    def __init__(self, device: torch.device) -> None:
        self.replicated: ModuleTensors | None = None
        self._generators = generators(device)

    def seed(self, microbatch: int, number: int) -> None:
        """Seed the generators for one random draw."""
        seed = mix(microbatch, number)
        if number >= _SEEDED:
            place = number >> _WITHIN << _WITHIN
            if (found := _states.by_number.get(place)) is not None:
                seed_draw, first = found
                seed_draw(first + number - place)
                return
            seed = mix(number)
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

    Args:
        gradients: how the step clears and reads gradients of the module's `tensors`; None if it may do so itself.
    """

    def __init__(
        self,
        draws: Draws,
        microbatch: int,
        gradients: StepGradients | None = None,
        tensors: ModuleTensors | None = None,
    ) -> None:
        super().__init__()
        self._gradients, self._tensors = gradients, tensors
        self._draws = draws
        self._microbatch = microbatch
        self.num_draws = 0
        self._is_entered = False

    def seed_draw(self, number: int) -> None:
        """Seed the generators for a draw of the micro-batch."""
        self._draws.seed(self._microbatch, number)

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
            self.seed_draw(self.num_draws)
            self.num_draws += 1
        elif func in GRADIENT_CALLS and self._gradients is not None:
            assert self._tensors is not None
            found = self._gradients.answer(func, args, self._tensors)
            if found is not UNANSWERED:
                return found
        return func(*args, **(kwargs or {}))

    def _scripted(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_active = any(mode is self for mode in _torch.function_modes())
        return self.__torch_function__(function, (), args, kwargs) if is_active else function(*args, **kwargs)

    def _resumed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        first = self.num_draws

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.num_draws = self.num_draws, first
            try:
                with self._active():
                    return function(*args, **kwargs)
            finally:
                self.num_draws = before

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
    with _torch.function_modes_taken_off(), ExitStack() as stack:
        for kind, *_ in autocast_state() or ():
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.set_grad_enabled(True))
        yield
