"""Suspends the steps of micro-batches at synchronization points. Each runs in its own thread, one at a time.

Under manual optimization the user's step makes calls that concern the whole batch, such as `optimizer.step()`. Each
micro-batch waits there until all have reached the same call, which is then made once::

    micro-batch 0   forward  backward |                | forward ...
    micro-batch 1   forward  backward |                | forward ...
    the batch                         | optimizer.step |

Threads keep torch's thread-local state, such as autocast and modes, apart between micro-batches. But autograd numbers
its nodes in each thread, and adds gradients in the order of these numbers, so events run in one thread alone
(`in_one_thread`).
"""

from __future__ import annotations

import contextvars
import functools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.draws import set_aside
from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.execution import autocast_as
from lightning_pipeline.recording.matcher import autocast_state

T = TypeVar("T")

BACKWARD = "backward"
CLOSURE_ENDS = "the end of a closure"
STEP_ENDS = "the end of training_step"
_RUN_CLOSURE = object()


@dataclass(slots=True)
class SyncPoint:
    """A call at which a step waits for the other micro-batches.

    Attributes:
        what: name of the call; must be the same for all micro-batches.
        perform: makes the call for the batch; takes a function that runs all micro-batches' closures, or None.
        closure: the closure that the micro-batch passed to the call.
        loss: the tensor on which backward is called, or that a closure returned.
        value: the loss's number in the recording; -1 for a tensor that every rank has.
        retain_graph: whether backward may run through the graph again.
        line: the line of the user's code.
        deferred: earlier calls that can be made here as well: their names, and functions that make them.
    """

    what: str
    perform: Callable[[Callable[[], Any] | None], Any] | None = None
    closure: Callable[[], Any] | None = None
    loss: Tensor | None = None
    value: int = -1
    retain_graph: bool = False
    line: str = ""
    deferred: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)

    @property
    def calls(self) -> list[str]:
        """Names of all calls, in order."""
        return [*(what for what, _ in self.deferred), self.what]


class _Thread(threading.Thread):
    """A thread reused for many steps, so that libraries allocate their per-thread buffers only once."""

    def __init__(self) -> None:
        super().__init__(name="training_step", daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            call()
            del call  # or it would keep the step's tensors until the next one


_idle: list[_Thread] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a forked process does not inherit threads


def end_idle_threads() -> None:
    """End the idle threads after a run. Daemon threads whose steps still wait end with the process."""
    while _idle:
        thread = _idle.pop()
        thread.calls.put(None)
        thread.join()


class _ClosedError(BaseException):
    """Raised inside a suspended step that is abandoned, to unwind it."""


class Suspended:
    """One micro-batch's step, which runs in a thread of its own.

    Args:
        function: runs the step.
        note: called with each synchronization point, in the step's thread.
    """

    def __init__(self, function: Callable[[], None], note: Callable[[SyncPoint], None], device: torch.device) -> None:
        self._function = function
        self._note = note
        self._device = device
        self._modes = _torch.function_modes()
        self._autocast = autocast_state()
        self._is_its_turn, self._is_ours = threading.Lock(), threading.Lock()  # each is released by the other side
        self._is_its_turn.acquire()
        self._is_ours.acquire()
        self._meeting: SyncPoint | None = None
        self._answer: Any = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._deferred: list[tuple[str, Callable[[], Any]]] = []
        self._request: Callable[[], Any] | None = None
        self._thread: _Thread | None = None

    def resume(self, answer: Any = None) -> SyncPoint:
        """Run the step up to its next synchronization point; the last one is `STEP_ENDS`.

        Args:
            answer: returned by the call at which the step waits.

        Raises:
            BaseException: whatever the step has raised.
        """
        self._answer = answer
        if self._thread is None:
            self._thread = _idle.pop() if _idle else _Thread()
            self._thread.calls.put(functools.partial(contextvars.copy_context().run, self._run))
        else:
            self._is_its_turn.release()
        self._is_ours.acquire()
        while self._request is not None:
            self._fulfil(self._request)
        self._raise_error()
        assert self._meeting is not None
        return self._meeting

    def run_closure(self) -> SyncPoint:
        """Run the closure with which the step waits."""
        return self.resume(_RUN_CLOSURE)

    def _fulfil(self, request: Callable[[], Any]) -> None:
        """Run what the step's thread asks for, and give the thread its turn again."""
        self._request = None
        try:
            self._answer = request()
        except BaseException as error:
            self._error = error
        self._is_its_turn.release()
        self._is_ours.acquire()

    def ask(self, request: Callable[[], Any]) -> Any:
        """Have the thread that resumes the step run a function. Called in the step's thread. Returns its result."""
        self._request = request
        self._give_turn()
        self._raise_error()
        return self._answer

    def close(self) -> None:
        """Unwind the step if it waits. It cannot be resumed afterwards."""
        self._is_closed = True
        if self._thread is not None:
            self._is_its_turn.release()
            _idle.append(self._thread)
            self._thread = None

    def defer(self, what: str, perform: Callable[[], Any]) -> None:
        """Make a call for the batch at the next synchronization point, before that point's own call."""
        self._deferred.append((what, perform))

    def meet(self, meeting: SyncPoint) -> Any:
        """Wait, in the step's thread, until the call is made for the batch. Returns its result."""
        meeting.line = users_line()
        answer = self._wait(meeting)
        while answer is _RUN_CLOSURE:
            assert meeting.closure is not None
            answer = self._wait(SyncPoint(CLOSURE_ENDS, loss=meeting.closure(), line=meeting.line))
        return answer

    def _run(self) -> None:
        _of_thread.step = self
        try:
            if self._device.type != "cpu":
                torch.get_device_module(self._device).set_device(self._device)
            for mode in self._modes:
                _torch.push_function_mode(mode)
            with torch.enable_grad(), autocast_as(self._autocast):
                self._function()
            self._come_to(SyncPoint(STEP_ENDS))
        except _ClosedError:
            return
        except BaseException as error:
            self._error = error
        finally:
            while _torch.num_function_modes():
                _torch.pop_function_mode()
            _of_thread.step = None
        self._is_ours.release()

    def _wait(self, meeting: SyncPoint) -> Any:
        if self._is_closed:
            raise _ClosedError
        self._come_to(meeting)
        self._give_turn()
        return self._answer

    def _give_turn(self) -> None:
        """Let the thread that resumes the step go on, until it resumes it again."""
        self._is_ours.release()
        self._is_its_turn.acquire()
        if self._is_closed:
            raise _ClosedError

    def _raise_error(self) -> None:
        """Raise what the other thread has raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _come_to(self, meeting: SyncPoint) -> None:
        meeting.deferred, self._deferred = self._deferred, []
        self._note(meeting)
        self._meeting = meeting


class _OfThread(threading.local):
    step: Suspended | None = None


_of_thread = _OfThread()


def running_step() -> Suspended | None:
    """The step that runs in the current thread, if any."""
    return _of_thread.step


def agree(what: str, meets: bool) -> bool:
    """Have all micro-batches come to the same call, which one of them makes: now, or by the next meeting. Gives whether
    a step runs in this thread."""
    step = running_step()
    if step is not None and meets:
        step.meet(SyncPoint(what, lambda closures: None))
    elif step is not None:
        step.defer(what, lambda: None)
    return step is not None


def in_one_thread(function: Callable[..., T], *args: Any) -> T:
    """Run what computes with autograd, in the thread that resumes steps if this is a step's own. Returns its result."""
    step = running_step()
    if step is None:
        return function(*args)

    def request() -> T:
        with set_aside():
            return function(*args)

    return step.ask(request)


MeetingOf = Callable[[Microbatch], SyncPoint]


class BatchWork(Protocol):
    """Callbacks for the batch around the parts of its micro-batches' steps.

    Attributes:
        needs_losses: whether every rank needs the values of the losses on which backward is called.
    """

    needs_losses: bool

    def turn(self, index: int) -> AbstractContextManager[None]:
        """Entered around a part of a micro-batch's own Python."""

    def pause(self, index: int) -> None:
        """Called when a micro-batch's step has come to where it waits for the others."""

    def end(self, index: int) -> None:
        """Called when a micro-batch's step has ended."""

    def before_part(self) -> None:
        """Called before micro-batches continue."""

    def after_part(self) -> None:
        """Called at each synchronization point other than a backward."""

    def performing(self) -> AbstractContextManager[None]:
        """Entered around a call for the batch."""

    def before_backward(self) -> None:
        """Called before the backward of the first micro-batch."""

    def after_backward(self, losses: Sequence[Tensor | None]) -> None:
        """Called after the backward of the last micro-batch, with all losses; they have data if `needs_losses`."""

    def closure_value(self, values: Sequence[Tensor | None]) -> Tensor | None:
        """Combine the values that the micro-batches' closures returned."""


class Parts:
    """Runs the steps of a batch's micro-batches, part by part.

    Args:
        steps: the step of each micro-batch.
        around: entered around the work of micro-batches, but not around calls for the batch.
        resumed: entered around a micro-batch's own Python.
        run: runs all micro-batches up to their next synchronization point; takes a function that runs a micro-batch's
            Python up to there.
    """

    def __init__(
        self,
        states: Sequence[Microbatch],
        steps: Sequence[Suspended],
        work: BatchWork,
        *,
        around: Callable[[], AbstractContextManager[None]],
        resumed: Callable[[Microbatch], AbstractContextManager[None]],
        run: Callable[[MeetingOf], None],
    ) -> None:
        self._states = states
        self._steps = steps
        self._work = work
        self._around = around
        self._resumed = resumed
        self._run = run
        self._go_on: Callable[[Suspended], SyncPoint] = Suspended.resume
        self._meetings: list[SyncPoint] = []

    def run(self) -> None:
        """Run the steps to their end.

        Raises:
            RuntimeError: micro-batches reached different calls.
        """
        try:
            self._run_to(STEP_ENDS, Suspended.resume)
        finally:
            for step in self._steps:
                step.close()

    def _run_to(self, end: str, go_on: Callable[[Suspended], SyncPoint]) -> list[SyncPoint]:
        while True:
            meetings = self._next(go_on)
            if meetings[0].what == end:
                return meetings
            answer = self._perform(meetings)
            go_on = _answering(answer)

    def _next(self, go_on: Callable[[Suspended], SyncPoint]) -> list[SyncPoint]:
        """Run all micro-batches up to their next synchronization points, and return those."""
        self._go_on, self._meetings = go_on, []
        self._work.before_part()
        with self._around():
            self._run(self._meeting_of)
        if self._meetings[0].what == BACKWARD:
            self._work.after_backward([meeting.loss for meeting in self._meetings])
        else:
            self._work.after_part()
        return self._meetings

    def _meeting_of(self, state: Microbatch) -> SyncPoint:
        """A micro-batch's next synchronization point. Runs its Python up to there, after that of earlier ones."""
        while len(self._meetings) <= state.index:
            one = self._states[len(self._meetings)]
            with self._resumed(one), self._work.turn(one.index):
                meeting = self._go_on(self._steps[one.index])
            (self._work.end if meeting.what == STEP_ENDS else self._work.pause)(one.index)
            first = self._meetings[0] if self._meetings else meeting
            if meeting.calls != first.calls:
                raise RuntimeError(_differing(first, meeting, one.index))
            if meeting is first:
                for _, perform in meeting.deferred:
                    perform()
                if meeting.what == BACKWARD:
                    self._work.before_backward()
            self._meetings.append(meeting)
        return self._meetings[state.index]

    def _perform(self, meetings: Sequence[SyncPoint]) -> Any:
        """Make the call for the batch, and return its result."""
        first = meetings[0]
        if first.what == BACKWARD:  # has run already, as part of the schedule
            return None
        assert first.perform is not None
        with ExitStack() as around:
            around.enter_context(self._work.performing())
            return first.perform(None if first.closure is None else functools.partial(self._run_closures, around))

    def _run_closures(self, around: ExitStack) -> Tensor | None:
        around.close()  # steps enter their own
        try:
            ended = self._run_to(CLOSURE_ENDS, Suspended.run_closure)
            return self._work.closure_value([meeting.loss for meeting in ended])
        finally:
            around.enter_context(self._work.performing())


def _answering(answer: Any) -> Callable[[Suspended], SyncPoint]:
    return lambda step: step.resume(answer)


def _differing(first: SyncPoint, other: SyncPoint, index: int) -> str:
    same = 0
    while first.calls[same : same + 1] == other.calls[same : same + 1]:
        same += 1
    told = [(_shown(one.calls[same:]), one.line) for one in (first, other)]
    (there, line), (here, other_line) = told
    return (
        f"micro-batch 0 comes to {there} ({line or 'the end of its step'}) and micro-batch {index} to {here} "
        f"({other_line or 'the end of its step'}): what is done once for the batch has to be called for by all of its "
        f"micro-batches in the same order, whatever is in them"
    )


def _shown(calls: Sequence[str]) -> str:
    return " then ".join(calls if len(calls) < 4 else [*calls[:2], "...", calls[-1]]) or "its next call"
