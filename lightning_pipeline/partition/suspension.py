"""Putting a run of the user's code aside, and taking it up again: torch's state of the thread goes with it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch.overrides import TorchFunctionMode

_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack


class TorchState:
    """What torch keeps for the running thread, of which code that takes turns needs its own: modes, whether autograd and
    inference mode are on, and autocast."""

    __slots__ = ("_autocast", "_grad", "_guard", "_inference", "_modes")

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in autocast_kinds()
        ]
        self._modes: list[TorchFunctionMode] = []
        self._guard: Any = None

    def leave(self, other: TorchState) -> None:
        """Go from this state, as it is now, to another."""
        self.__init__()  # type: ignore[misc]
        while torch._C._len_torch_function_stack():
            self._modes.append(_pop())
        other._enter()
        if other._inference != self._inference:
            self._guard = torch._C._InferenceMode(other._inference)

    def come_back(self) -> None:
        """Go back to what `leave` left."""
        self._guard = None  # whose end sets inference mode to what it was
        self._enter()
        while self._modes:
            _push(self._modes.pop())

    def _enter(self) -> None:
        torch._C._set_grad_enabled(self._grad)
        for kind, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)


class Suspendable:
    """A function that may stop in the middle, with a question, and goes on with the answer."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.question: Any = None
        self.result: Any = None
        self.is_done = False
        self._run = greenlet(function)
        self._run.gr_context = contextvars.copy_context()
        self._outside = TorchState()

    def go_on(self, answer: Any = None) -> None:
        """Run until the next question, or the end. Raises what the function raises."""
        self._outside = TorchState()
        given = () if self.question is None else (answer,)
        found = self._run.switch(*given)
        if self._run.dead:
            self.is_done, self.question, self.result = True, None, found
        else:
            self.question = found

    def ask(self, question: Any) -> Any:
        """From within: stop here, and go on with the answer."""
        own = TorchState()
        own.leave(self._outside)
        run = getcurrent()
        assert run.parent is not None
        answer = run.parent.switch(question)
        own.come_back()
        return answer


def autocast_kinds() -> list[str]:
    """Of devices for which autocast may be on."""
    kinds = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kinds if accelerator is None else [*kinds, accelerator.type]
