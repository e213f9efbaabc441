"""Steps that stop in the middle: each micro-batch's in a thread of its own, of which one runs at a time.

Under manual optimization the user's step calls for what is the whole batch's, such as an optimizer's step. There every
micro-batch's step waits until the others have come to the same call, which is then done once::

    micro-batch 0   forward  backward |                | forward ...
    micro-batch 1   forward  backward |                | forward ...
    the batch                         | optimizer.step |

A thread keeps what torch knows of a step between its calls, as autocast and modes are, apart from that of the others.
"""

from __future__ import annotations

import contextvars
import functools
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from lightning_pipeline.partition.execution import autocast_as
from lightning_pipeline.partition.matcher import autocast_state
from lightning_pipeline.partition.users_line import users_line

BACKWARD = "backward"
CLOSURE_ENDS = "the end of a closure"
STEP_ENDS = "the end of training_step"
_RUN_CLOSURE = object()


@dataclass(slots=True)
class Meeting:
    """What a step has come to, and waits for the others.

    Attributes:
        what: the call, alike for all micro-batches.
        perform: does for the batch what was called for, given what runs all micro-batches' closures.
        closure: the micro-batch's own.
        loss: what backward is called on, or a closure has returned.
        value: its number in the recording; -1 for what every rank has.
        retain_graph: backward may come once more.
        line: where in the user's code.
        deferred: calls before this one that nobody could tell from calls here: what they are, and what does them.
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
        """What the batch is called for, in order."""
        return [*(what for what, _ in self.deferred), self.what]


class _Thread(threading.Thread):
    """Runs one step after another: what libraries keep for each thread, such as buffers for matrices, is made once."""

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
    os.register_at_fork(after_in_child=_idle.clear)  # threads do not come along


def end_idle_threads() -> None:
    """After a run. Threads of steps that still wait end with their process."""
    while _idle:
        thread = _idle.pop()
        thread.calls.put(None)
        thread.join()


class _ClosedError(BaseException):
    """Unwinds a step that nobody will go on with."""


class Suspended:
    """One micro-batch's step.

    Args:
        function: the step.
        note: is called with each meeting, in the step's thread.
    """

    def __init__(self, function: Callable[[], None], note: Callable[[Meeting], None], device: torch.device) -> None:
        self._function = function
        self._note = note
        self._device = device
        self._modes = _get_current_function_mode_stack()
        self._autocast = autocast_state()
        self._is_its_turn, self._is_ours = threading.Lock(), threading.Lock()  # each is released by the other side
        self._is_its_turn.acquire()
        self._is_ours.acquire()
        self._meeting: Meeting | None = None
        self._answer: Any = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._deferred: list[tuple[str, Callable[[], Any]]] = []
        self._thread: _Thread | None = None

    def resume(self, answer: Any = None) -> Meeting:
        """Let the step go on to the next meeting, which is its end in the end.

        Args:
            answer: what the call that it waits for gives.

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
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        assert self._meeting is not None
        return self._meeting

    def run_closure(self) -> Meeting:
        """Let the step, which waits with a closure, run that."""
        return self.resume(_RUN_CLOSURE)

    def close(self) -> None:
        """Unwind the step if it waits. It is not to run any more."""
        self._is_closed = True
        if self._thread is not None:
            self._is_its_turn.release()
            _idle.append(self._thread)
            self._thread = None

    def defer(self, what: str, perform: Callable[[], Any]) -> None:
        """Have the batch do something before whatever comes next of its own."""
        self._deferred.append((what, perform))

    def meet(self, meeting: Meeting) -> Any:
        """Wait, in the step's thread, until the batch has done what is called for. Returns what that gives."""
        meeting.line = users_line()
        answer = self._wait(meeting)
        while answer is _RUN_CLOSURE:
            assert meeting.closure is not None
            answer = self._wait(Meeting(CLOSURE_ENDS, loss=meeting.closure(), line=meeting.line))
        return answer

    def _run(self) -> None:
        _of_thread.step = self
        try:
            if self._device.type != "cpu":
                torch.get_device_module(self._device).set_device(self._device)
            for mode in self._modes:
                torch._C._push_on_torch_function_stack(mode)
            with torch.enable_grad(), autocast_as(self._autocast):
                self._function()
            self._come_to(Meeting(STEP_ENDS))
        except _ClosedError:
            return
        except BaseException as error:
            self._error = error
        finally:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            _of_thread.step = None
        self._is_ours.release()

    def _wait(self, meeting: Meeting) -> Any:
        if self._is_closed:
            raise _ClosedError
        self._come_to(meeting)
        self._is_ours.release()
        self._is_its_turn.acquire()
        if self._is_closed:
            raise _ClosedError
        return self._answer

    def _come_to(self, meeting: Meeting) -> None:
        meeting.deferred, self._deferred = self._deferred, []
        self._note(meeting)
        self._meeting = meeting


class _OfThread(threading.local):
    step: Suspended | None = None


_of_thread = _OfThread()


def running_step() -> Suspended | None:
    """The step in whose thread this is called."""
    return _of_thread.step
