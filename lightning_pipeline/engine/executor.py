"""Runs one rank's actions of a schedule, in order.

Receives are posted ahead of need, a bounded number in each direction, so that data travels while a stage computes::

    actions   RECV_F0  F0  SEND_F0  RECV_F1  F1  SEND_F1  RECV_B0  B0 ...
    posted    F0 F1 | B0 B1      F2 after RECV_F0 is done, B2 after RECV_B0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.profiler import record_function

from lightning_pipeline import _torch
from lightning_pipeline.engine.offloading import Move, with_moves
from lightning_pipeline.schedules import Action, Kind

RECEIVES_AHEAD = 2
"""Number of receives in each direction that are posted ahead of need."""

Span = tuple[Action, float, float]


class StageWork(Protocol):
    """A virtual stage, which has the methods of `METHODS` and `POSTS`; each takes the number of the micro-batch.

    `ready_at` is when the inputs of the last computation had arrived (`time.perf_counter`). `waiting` has the methods
    of moves to host memory and back, if there are any.
    """

    ready_at: float
    waiting: Any


METHODS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
    Kind.SEND_F: "send_forward",
    Kind.SEND_B: "send_backward",
    Kind.RECV_F: "receive_forward",
    Kind.RECV_B: "receive_backward",
}
_BACKWARD = (Kind.RECV_B, Kind.B, Kind.I)
POSTS = {Kind.RECV_F: "post_forward", Kind.RECV_B: "post_backward"}


class RankProgram:
    """One rank's actions, in a form that is computed once and used by all steps.

    Args:
        offload: the share of activations that goes to host memory while they wait: their moves are among the calls. Of
            0, activations are only counted; None: neither.

    Attributes:
        calls: stage, method and micro-batch of each action or move, and the action, None for a move.
        prepared: the micro-batches that can be prepared after each call. A receive is waited for by the computation
            behind it, so the last send or receive before one has them: no send waits for a preparation. In the warm-up
            a stage waits for one micro-batch per stage before it.
    """

    def __init__(self, actions: Sequence[Action], *, offload: float | None = None) -> None:
        self.actions = actions
        called: Sequence[Action | Move] = actions if offload is None else with_moves(actions, sends=offload > 0)
        self.prepared: list[list[int]] = [[] for _ in called]
        next_forward, last_before = -1, len(called) - 1
        for index in reversed(range(len(called))):
            action = called[index]
            if isinstance(action, Move) or action.kind.is_compute:
                last_before = index - 1
            if isinstance(action, Move):
                continue
            if action.kind is Kind.F:
                next_forward = action.microbatch
            elif action.kind is Kind.RECV_F:
                self.prepared[last_before].append(action.microbatch + action.stage)
            elif action.kind is Kind.RECV_B and next_forward >= 0:
                self.prepared[last_before].append(next_forward)
        self.is_backward = [one.kind in _BACKWARD if isinstance(one, Action) else False for one in called]
        self.calls: list[tuple[int, str, int, Action | None]] = [
            (one.stage, METHODS[one.kind], one.microbatch, one)
            if isinstance(one, Action)
            else (one.stage, one.method, one.microbatch, None)
            for one in called
        ]
        self.posts = {
            kind: [(action.stage, post, action.microbatch) for action in actions if action.kind == kind]
            for kind, post in POSTS.items()
        }


class ScheduleRun:
    """Runs a step's actions in order. A computation starts when its inputs have arrived: that wait is the bubble.

    Args:
        observe: called with each action and its start and end in seconds (`time.perf_counter`).
        before_backward: called with a micro-batch before each of its backward actions. It may call `go_on`.
        prepare: called with a micro-batch that there is time to prepare. It may call `go_on`.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, StageWork],
        observe: Callable[[Span], None] | None = None,
        before_backward: Callable[[int], None] | None = None,
        prepare: Callable[[int], None] | None = None,
    ) -> None:
        self._prepare = prepare
        self._prepared = program.prepared
        self._before_backward = before_backward
        self._is_backward = program.is_backward
        ahead = {kind: _Ahead(posts, stages) for kind, posts in program.posts.items()}
        is_profiling = _torch.is_profiling()
        self._calls: list[tuple[Callable[[int], None], int, _Ahead | None]] = []
        for number, method, microbatch, action in program.calls:
            stage = stages[number]
            if action is None:
                self._calls.append((getattr(stage.waiting, method), microbatch, None))
                continue
            call = getattr(stage, method)
            if observe is not None:
                call = _observed(call, action, stage, observe)
            if is_profiling:
                call = _profiled(call, action)
            self._calls.append((call, microbatch, ahead.get(action.kind)))
        self._is_done = bytearray(len(self._calls))
        self._queues = ahead.values()
        for queue in self._queues:
            queue.post()

    def go_on(self, *, below: int | None = None) -> None:
        """Run the actions that have not run yet. May be called from within an action.

        Args:
            below: run only actions of micro-batches before this one.
        """
        is_done = self._is_done
        for index, (call, microbatch, receives) in enumerate(self._calls):
            if is_done[index] or (below is not None and microbatch >= below):
                continue
            if self._before_backward is not None and self._is_backward[index]:
                self._before_backward(microbatch)
                if is_done[index]:
                    continue
            is_done[index] = True  # before the call, which may itself call `go_on`
            call(microbatch)
            if receives is not None:
                receives.done()
            if self._prepare is not None and below is None and self._prepared[index]:
                for prepared in self._prepared[index]:
                    self._prepare(prepared)
                for queue in self._queues:
                    queue.post()


class _Ahead:
    """Posts receives in the order of the schedule, a bounded number before they are needed.

    The queue stops at a receive whose tensor shapes are not known yet. Actions that run out of order
    (`ScheduleRun.go_on`) post their receives out of order, too, as their senders do with their sends.
    """

    def __init__(self, posts: Sequence[tuple[int, str, int]], stages: Mapping[int, StageWork]) -> None:
        self._posts = posts
        self._stages = stages
        self._posted = 0
        self._finished = 0

    def post(self) -> None:
        limit = min(self._finished + RECEIVES_AHEAD, len(self._posts))
        while self._posted < limit:
            stage, method, microbatch = self._posts[self._posted]
            if not getattr(self._stages[stage], method)(microbatch):
                return
            self._posted += 1

    def done(self) -> None:
        self._finished += 1
        self.post()


def _observed(
    call: Callable[[int], None], action: Action, stage: StageWork, observe: Callable[[Span], None]
) -> Callable[[int], None]:
    def timed(microbatch: int) -> None:
        start = time.perf_counter()
        call(microbatch)
        observe((action, max(start, stage.ready_at) if action.kind.is_compute else start, time.perf_counter()))

    return timed


def _profiled(call: Callable[[int], None], action: Action) -> Callable[[int], None]:
    """A call that torch's profiler shows as a range, with the kernels that it launches beneath it."""

    def ranged(microbatch: int) -> None:
        with record_function(f"pipeline {action}"):
            call(microbatch)

    return ranged
