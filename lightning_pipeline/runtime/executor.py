"""Runs one rank's actions of a schedule: a table and a loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_pipeline.schedules import Action

RECEIVES_AHEAD = 2
"""Receives in each direction that are posted before they are needed."""

Span = tuple[Action, float, float]


class StageWork(Protocol):
    """What a stage can do with one micro-batch; each method takes the micro-batch's number.

    `ready_at` is when the inputs of the last forward or backward were there (`time.perf_counter`).
    """

    ready_at: float

    def forward(self, microbatch: int) -> None: ...
    def backward(self, microbatch: int) -> None: ...
    def send_forward(self, microbatch: int) -> None: ...
    def send_backward(self, microbatch: int) -> None: ...
    def receive_forward(self, microbatch: int) -> None: ...
    def receive_backward(self, microbatch: int) -> None: ...
    def post_forward(self, microbatch: int) -> bool: ...
    def post_backward(self, microbatch: int) -> bool: ...


def execute(actions: Sequence[Action], work: StageWork, observe: Callable[[Span], None] | None = None) -> None:
    """Do `actions` in order; `observe` gets each with its start and end in seconds (`time.perf_counter`).

    A forward or backward starts when its inputs are there: the wait for them is the bubble.
    """
    table = {
        "F": work.forward,
        "B": work.backward,
        "SEND_F": work.send_forward,
        "SEND_B": work.send_backward,
        "RECV_F": work.receive_forward,
        "RECV_B": work.receive_backward,
    }
    ahead = {
        "RECV_F": _Ahead(actions, "RECV_F", work.post_forward),
        "RECV_B": _Ahead(actions, "RECV_B", work.post_backward),
    }
    for queue in ahead.values():
        queue.post()
    for action in actions:
        start = time.perf_counter() if observe is not None else 0.0
        table[action.kind](action.microbatch)
        if action.kind in ahead:
            ahead[action.kind].done()
        if observe is not None:
            observe((action, max(start, work.ready_at) if action.kind.is_compute else start, time.perf_counter()))


class _Ahead:
    """Posts receives in the order of the schedule, a bounded number before they are needed.

    A receive whose size is not known before its header is read stops the queue until it is its turn.
    """

    def __init__(self, actions: Sequence[Action], kind: str, post: Callable[[int], bool]) -> None:
        self._microbatches = [action.microbatch for action in actions if action.kind == kind]
        self._post = post
        self._posted = 0
        self._finished = 0

    def post(self) -> None:
        limit = min(self._finished + RECEIVES_AHEAD, len(self._microbatches))
        while self._posted < limit and self._post(self._microbatches[self._posted]):
            self._posted += 1

    def done(self) -> None:
        self._finished += 1
        self._posted = max(self._posted, self._finished)
        self.post()
