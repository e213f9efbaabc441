"""Brings the data that a running step's Python asks for to every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.draws import set_aside
from lightning_pipeline.engine.ending import check_on_the_way
from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.suspended import in_one_thread
from lightning_pipeline.recording.recording import Recording

if TYPE_CHECKING:
    from lightning_pipeline.engine.step import PipelineStep


class FailedRead(BaseException):
    """A read has failed; `reads_failing` raises its error when the step's Python is left."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def reads_failing() -> Iterator[None]:
    """Around a step: raises the error of a read that has failed."""
    try:
        yield
    except FailedRead as failed:
        failed.__cause__ = failed.__context__ = None  # or the error would be in its own context
        raise failed.error from None


class StepReads:
    """The reads of one step: `Reads` of its recordings.

    A value of a micro-batch that runs ahead of its Python is on its way already. For any other, the schedule is left:
    the micro-batches before it finish, and its events so far run in order.
    """

    def __init__(self, step: PipelineStep) -> None:
        self._step = step
        self._shared = step.shared
        self._in_inference_mode = _torch.is_inference_mode_enabled()

    def read(self, recording: Recording, values: Sequence[int]) -> list[Tensor]:
        step, state = self._step, self._state_of(recording)
        is_earlier = recording is not self._shared.recorder.current
        with self._aside():
            if step.ahead is not None and state.is_open and not is_earlier:
                found = in_one_thread(step.ahead.values, state, recording, values)
                if found is not None:
                    return found
            self._warn()
            if is_earlier and (state.is_done or state.program is not None):
                if not state.is_done:
                    assert step.run is not None
                    in_one_thread(partial(step.run.go_on, below=state.index + 1))
                return [self._shared.spread_kept(state, value) for value in values]
            run = in_one_thread(step.begin_in_order, state)
            if not state.is_done:
                self._check(recording, "reads a value")
                in_one_thread(run.run_up_to, recording.event)
            return run.data_of(values)

    def read_held(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        ahead = self._step.ahead
        with self._aside():
            known = ahead.values_of_module(tensors) if ahead is not None else None
            return self._shared.spread_module_tensors(tensors) if known is None else known

    def finish_before(self, recording: Recording, *, with_own: bool) -> None:
        state = self._state_of(recording)
        with self._aside():
            if with_own:
                run = in_one_thread(self._step.begin_in_order, state)
                in_one_thread(run.run_up_to, recording.event)
            else:
                assert self._step.run is not None
                in_one_thread(partial(self._step.run.go_on, below=state.index))

    def shown(self, recording: Recording, value: int, show: Callable[[Tensor], str]) -> str:
        state, shared = self._state_of(recording), self._shared
        with self._aside():
            run = in_one_thread(self._step.begin_in_order, state)
            self._check(recording, "shows a value")
            in_one_thread(run.run_up_to, recording.event)
            tensor: Tensor | None
            if value < 0:
                owner, tensor = shared.holders(-1 - value)[0], shared.tensors.tensors[-1 - value]
            else:
                owner, tensor = shared.rank_of(run.homes[value]), run.value(value)
            assert shared.direct is not None
            if owner != shared.rank:
                return shared.direct.hear(owner, "the text of a tensor")
            assert tensor is not None
            text = show(tensor)
            shared.direct.tell(text)
            return text

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """The user's modes and autocast must not affect what runs for a read, nor a `try` around it hide that it has
        failed: other ranks wait for its result.
        """
        try:
            with torch.inference_mode(self._in_inference_mode), set_aside():
                yield
        except Exception as error:
            raise FailedRead(error) from error

    def _check(self, recording: Recording, then: str) -> None:
        check_on_the_way(self._step.states, recording, self._shared.transport, then)

    def _state_of(self, recording: Recording) -> Microbatch:
        return next(state for state in self._step.states if state.recording is recording)

    def _warn(self) -> None:
        """Warn once that reading values in training_step makes stages wait for one another."""
        work, states = self._step.work, self._step.states
        if self._shared.warnings.has_noted_read or work.loss_of is None or len(states) == 1:
            return
        if self._shared.expectations.has_given_up(self._shared.beginning(states[0], work)):
            self._shared.warnings.note_read()
