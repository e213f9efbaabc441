"""Failure notices: how the ranks learn that one of them failed, and which."""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from lightning_pipeline.runtime.topology import Topology

T = TypeVar("T")

GRACE_S = 2.0  # how long a rank whose connection broke looks for the notice that says why
LINGER_S = 3.0  # how long the store's host stays for the others to read its notice
FOREVER = timedelta(days=365)
CLOSED = "closed"


class PipelineTimeoutError(RuntimeError):
    """A peer did not deliver within the timeout."""


class PeerFailedError(RuntimeError):
    """Another rank raised or died; ``failure`` says which and why."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True)
class Failure:
    """The first failure of a run: the rank it happened on, what it said, and whether its process is gone."""

    rank: int
    summary: str
    traceback: str = ""
    is_gone: bool = False


class FailureNotice:
    """Spreads the first failure of any rank to all, through the store of the process group.

    A daemon thread waits in the store for this rank's copy of the notice, so the news is here, and costs nothing,
    before the broken connections wake the main thread. Every rank makes its notices in the same order.

    Args:
        store: the default process group's store, or a PrefixStore around it. Unused with one rank.
        topology: names ranks in messages.
    """

    def __init__(self, store: Store | None, topology: Topology) -> None:
        self.topology = topology
        self.failure: Failure | None = None
        self.tear_down: Callable[[], None] = lambda: None  # closes this rank's connections
        self.interrupt: Callable[[], None] = lambda: None  # ends device work that waits for a failed rank
        self._arrived = threading.Event()
        self._host_is_gone = False
        self._thread: threading.Thread | None = None
        if store is None or topology.world_size == 1:
            return
        # A fresh prefix for each notice of a process: the store outlives a strategy.
        generation = store.add(f"pipeline_failure/rank{topology.rank}", 1)
        # A store connection serves one call at a time, so the blocked watcher has its own, and writing another.
        prefix = f"pipeline_failure/{generation}"
        self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._watched = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._watched.set_timeout(FOREVER)
        self._thread = threading.Thread(target=self._watch, name="pipeline-failure-notice", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that wakes up in a finalising interpreter would abort it

    def publish(self, error: BaseException) -> None:
        """Tell every rank that this one failed with `error`; only the first failure of a run counts. Never raises."""
        if self._thread is None or self.failure is not None:
            return
        failure = error.failure if isinstance(error, PeerFailedError) else _describe(error, self.topology.rank)
        text = json.dumps(asdict(failure))

        def write() -> None:
            if self._store.compare_set("first", "", text).decode() == text:
                for rank in range(self.topology.world_size):
                    self._store.set(str(rank), text)

        _bounded(write, GRACE_S)

    def fail(self, error: BaseException) -> None:
        """Publish `error`, close this rank's connections so that its peers wake up, and let them read why.

        Bounded by some seconds and never raises. Call it on every rank for whatever ends the run, and raise on.
        """
        self.publish(error)
        for act in (self.interrupt, self.tear_down):
            with contextlib.suppress(Exception):
                act()
        if self.topology.rank == 0 and self._thread is not None:  # the store lives in this process
            _bounded(lambda: self._store.wait(["all_read"], timedelta(seconds=LINGER_S)), LINGER_S + 1)
        self.close()

    def close(self) -> None:
        """Stop watching. Never raises."""
        thread = self._thread
        if thread is None:
            return
        atexit.unregister(self.close)
        if thread.is_alive() and _bounded(lambda: self._store.set(str(self.topology.rank), CLOSED), GRACE_S):
            thread.join(GRACE_S)
        self._thread = None

    def explain(self, error: BaseException, *, waiting_for: str, peer: int, timed_out_after: float | None) -> Exception:
        """The exception to raise when a wait for `peer` (a global rank) broke with `error`.

        Args:
            waiting_for: what and from whom, such as ``"the activations of micro-batch 3 from stage 0 (rank 0)"``.
            timed_out_after: seconds waited if the timeout passed, None if the connection broke.
        """
        me = self.topology.describe(self.topology.rank)
        if self._thread is not None:
            self._arrived.wait(GRACE_S if timed_out_after is None else 0.0)
        failure = self.failure
        if failure is None and timed_out_after is not None:
            return PipelineTimeoutError(
                f"{me} waited {timed_out_after:g} s for {waiting_for}, and nothing came: the process of rank {peer} "
                f"is stopped, out of step or slower than the timeout. Raise the strategy's `timeout` if it is slow"
            )
        if failure is None:
            # A host that ends in order leaves its store open until all have read its notice.
            culprit = 0 if self._host_is_gone else peer
            reason = "so did the store it hosts" if self._host_is_gone else str(error).partition("\n")[0]
            failure = Failure(culprit, f"its process ended or lost its connections ({reason})", is_gone=True)
        name = self.topology.describe(failure.rank)
        message = f"{name} failed: {failure.summary}\n{me} was waiting for {waiting_for}"
        if failure.traceback:
            message += f"\nTraceback of rank {failure.rank}:\n{failure.traceback}"
        return PeerFailedError(message, failure)

    def _watch(self) -> None:
        try:
            text = self._watched.get(str(self.topology.rank)).decode()
            if text != CLOSED:
                self.failure = Failure(**json.loads(text))
                self._arrived.set()
                if self._watched.add("read", 1) == self.topology.world_size - self.failure.is_gone:
                    self._watched.set("all_read", "")
        except RuntimeError:
            self._host_is_gone = True
        finally:
            self._arrived.set()
        if self.failure is not None:
            with contextlib.suppress(Exception):
                self.interrupt()


def _describe(error: BaseException, rank: int) -> Failure:
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    frames = traceback.format_exception(type(error), error, error.__traceback__)
    return Failure(rank, summary, "".join(frames[-12:]).rstrip())


def _bounded(call: Callable[[], Any], seconds: float) -> bool:
    """Whether `call` returned in time: a store whose host is stopped or dead may block a call or fail it."""
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            call()
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()
