"""One step of a pipeline with one rank: the user's step runs on data, without recording."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipeline.engine.draws import CountedDraws, Draws
from lightning_pipeline.engine.executor import RankProgram, Span
from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.engine.suspended import BACKWARD, STEP_ENDS, MeetingOf, Suspended, agree
from lightning_pipeline.engine.work import LiveCount, StepTask
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.torch_functions import kind_of
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.own_changes import OwnChanges
from lightning_pipeline.recording.step_gradients import (
    GETTERS,
    SETTERS,
    UNANSWERED,
    StepGradients,
    refuse_update,
    refuse_written_gradient,
    share_memory,
    written,
)
from lightning_pipeline.schedules import Kind


class _ByHand(CountedDraws):
    """A micro-batch of a hand-optimized step, which makes changes of the batch's once for all (see `OwnChanges`).

    Refuses that it changes parameters' gradients, and updates parameters by itself otherwise, as each of them would.
    """

    def __init__(self, changes: OwnChanges, *args: Any) -> None:
        super().__init__(*args)
        self._changes = changes
        self._read: Any = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = kind_of(func), kwargs or {}
        is_of_parameter = bool(args) and isinstance(args[0], nn.Parameter)
        if func in SETTERS and is_of_parameter and len(args) > 1 and args[1] is not None:
            refuse_written_gradient()
        targets = written(func, kind, args, kwargs) if self._read else []
        if share_memory(targets, self._read):
            refuse_written_gradient()
        call = partial(super().__torch_function__, func, types, args, kwargs)
        found = self._changes.make(func, kind, args, kwargs, call)
        if found is UNANSWERED:
            if share_memory(targets, self._read.values()):
                refuse_update()
            found = call()
            self._changes.note(func, kind, args, kwargs, found)
        if func in GETTERS and found is not None and is_of_parameter:
            self._read[found] = args[0]
            self._changes.note_free(found)
        return found


@dataclass(eq=False)
class OneRankStep:
    """A step whose micro-batches run one after another, as in one process that accumulates gradients."""

    _shared: RankResources
    _work: StepTask
    _states: list[Microbatch]
    _live: LiveCount
    _observe: Callable[[Span], None] | None

    def run_micro_batches(self, program: RankProgram) -> None:
        """Run forward and backward of each micro-batch in turn.

        Args:
            program: the actions to report.
        """
        work, draws = self._work, self._shared.draws
        for state in self._states:
            began = time.perf_counter()
            counted = CountedDraws(*self._counted(state))
            with counted.running():
                state.result, state.loss = work.step(state, _batch_of(state))
            self._live.add()
            began = self._report(state, began, program, is_forward=True)
            if work.loss_of is not None:
                if state.loss is not None:
                    loss, state.loss = state.loss, state.loss.detach()
                    draws.seed(state.seed, counted.num_draws)  # hooks in backward may draw random numbers
                    work.run_backward(work.loss_of(state, loss))
                    del loss
                self._note_backward(state)
                self._report(state, began, program, is_forward=False)
            self._live.now -= 1
            state.result = tree.replace(state.result, Tensor.detach)

    def _counted(self, state: Microbatch) -> tuple[Draws, int, StepGradients | None, ModuleTensors]:
        work = self._work
        # Gradients of earlier batches are held back from automatic steps; a single hand-optimized one has its own.
        is_told = work.loss_of is not None and (work.batch is None or len(self._states) > 1)
        gradients = work.gradients if is_told else None
        return self._shared.draws, state.seed, gradients, self._shared.tensors

    def suspended(self, state: Microbatch) -> tuple[Suspended, Callable[[], AbstractContextManager[None]]]:
        """A hand-optimized step of a micro-batch, and what to enter around each of its parts."""
        changes = OwnChanges(self._shared.tensors, agree, is_first=state.index == 0)
        given = self._counted(state)
        counted = _ByHand(changes, *given) if len(self._states) > 1 else CountedDraws(*given)
        batch = _batch_of(state)

        def run() -> None:
            with counted:
                state.result, _ = self._work.step(state, batch)

        return Suspended(run, lambda meeting: changes.met(), self._shared.device), counted.resumed

    def run_part(self, meeting_of: MeetingOf) -> None:
        """Do what a hand-optimized step asks for at a synchronization point."""
        work = self._work
        for state in self._states:
            meeting = meeting_of(state)
            if meeting.what == BACKWARD:
                assert meeting.loss is not None and work.loss_of is not None
                given = {"retain_graph": True} if meeting.retain_graph else {}
                work.run_backward(work.loss_of(state, meeting.loss), **given)
                self._note_backward(state)
            if meeting.loss is not None:
                meeting.loss = meeting.loss.detach()
            if meeting.what == STEP_ENDS:
                state.result = tree.replace(state.result, Tensor.detach)

    def _note_backward(self, state: Microbatch) -> None:
        for stage in self._shared.stages:
            self._work.after_backward(stage, state)

    def _report(self, state: Microbatch, began: float, program: RankProgram, *, is_forward: bool) -> float:
        """Report actions that ran as one call: the first is given all of the time. Returns the current time."""
        now = time.perf_counter()
        if self._observe is not None:
            for action in program.actions:
                if action.microbatch == state.index and (action.kind is Kind.F) is is_forward:
                    self._observe((action, began, now))
                    began = now
        return now


def _batch_of(state: Microbatch) -> object:
    return tree.rebuild(state.layout, state.structure.joined(state.everywhere, state.given))
