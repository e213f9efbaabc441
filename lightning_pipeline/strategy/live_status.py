"""A thread that writes what this rank is at, a few times a second, for `lightning-pipeline watch`."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import CodeType

from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.runtime.endpoint import Endpoint
from lightning_pipeline.runtime.host_memory import peak_memory
from lightning_pipeline.schedules.live import LiveRank, at_work

from .session import Session

EVERY_S = 0.5
_WAIT, _STEP = Endpoint.wait.__code__, Pipeline.run.__code__


class LiveStatus:
    """Looks at the training thread from outside, so that nothing is done for it in there.

    What has been done is what was recorded of the step, and whether the thread waits is seen by the functions it is in.
    """

    def __init__(self, folder: Path, session: Session) -> None:
        if session.topology.rank == 0:  # what a run before this one has left; other ranks write theirs again
            shutil.rmtree(folder, ignore_errors=True)
        self._folder, self._session = folder, session
        self._watched = threading.get_ident()
        self._spans: list[Span] = []
        self._step, self._began, self._seconds = 0, 0.0, 0.0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="PipelineTimeline", daemon=True)
        self._thread.start()

    def begin(self, step: int, spans: list[Span]) -> None:
        """Look at another step, whose actions are appended to `spans` as they end."""
        now = time.perf_counter()
        if self._began:
            self._seconds = now - self._began
        self._step, self._spans, self._began = step, spans, now

    def end(self, *, forget: bool) -> None:
        """Look no more, and with `forget` remove the file; without, it tells what the rank was at before it failed."""
        self._has_ended.set()
        self._thread.join()
        if forget:
            (self._folder / f"{self._session.topology.rank}.json").unlink(missing_ok=True)
            with suppress(OSError):  # other ranks are in it
                self._folder.rmdir()

    def look(self) -> LiveRank:
        """What the rank is at."""
        pipeline, topology = self._session.pipeline, self._session.topology
        program = pipeline.program(training=True, num_microbatches=pipeline.num_microbatches).actions
        done = {action for action, _, _ in self._spans[:]}
        ranks = [topology.pipeline_ranks[rank] for rank in pipeline.placement]
        running = self._running()
        is_waiting = _WAIT in running
        if _STEP in running:
            now, live = at_work(program, done, ranks, is_waiting=is_waiting)
        else:
            now, live = "is between steps", 0
        return LiveRank(
            rank=topology.rank,
            stages=list(pipeline.stages),
            step=self._step,
            now=now,
            is_waiting=is_waiting,
            done=len(done),
            actions=len(program),
            live=live,
            memory=peak_memory(self._session.device),
            seconds=round(self._seconds, 6),
        )

    def _running(self) -> set[CodeType]:
        """The functions that the training thread is in. Their variables are left alone: a look would keep tensors."""
        found, frame = set(), sys._current_frames().get(self._watched)
        while frame is not None:
            found.add(frame.f_code)
            frame = frame.f_back
        return found

    def _write_on(self) -> None:
        while not self._has_ended.wait(EVERY_S):
            try:
                self.look().write(self._folder)
            except OSError:  # such as a full disk: the run goes on, and the file is old
                continue
