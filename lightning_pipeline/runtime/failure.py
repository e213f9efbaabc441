"""Failure notices: how the ranks learn that one of them failed, and which."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed import PrefixStore, Store

from lightning_pipeline.runtime.excepthook import show_as_line

GRACE_S = 2.0  # how long a rank whose connection broke looks for the notice that says why
LINGER_S = 3.0  # how long the store's host stays for the others to read its notice
PATIENCE_S = 5.0  # how long a rank that is busy elsewhere may go on after another one failed
FOREVER = timedelta(days=365)
CLOSED = "closed"

# What a rank's collectives say when another's process is gone: Gloo, NCCL, and the system under both.
BROKEN = ("connection closed", "connection was likely closed", "connection reset", "broken pipe", "process exited")


class PipelineTimeoutError(RuntimeError):
    """A peer did not deliver within the timeout."""


class PeerFailedError(RuntimeError):
    """Another rank raised or died; ``failure`` says which and why, with its traceback if it had one."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True)
class Failure:
    """The first failure of a run: the rank it happened on (None if that is not known), what it said, and whether its
    process is gone."""

    rank: int | None
    summary: str
    traceback: str = ""
    is_gone: bool = False


class FailureNotice:
    """Spreads the first failure of any rank to all, through the store of the process group.

    A daemon thread waits in the store for this rank's copy of the notice, so the news is here, and costs nothing,
    before the broken connections wake the main thread. Every rank makes its notices in the same order.

    Args:
        store: the default process group's store, or a PrefixStore around it. Unused with one rank.
        rank: this process, of `world_size`.

    Attributes:
        failure: the first failure of the run, once it is known here.
        describe: names a rank in messages.
        tear_down: closes this rank's connections.
        interrupt: ends device work that waits for a failed rank.
        is_strict: end this process some seconds after another rank failed, if the main thread has not come to know:
            it may be in a long computation, reading data or waiting for something that is not ours.
    """

    # Connections outlive a strategy, and the notice that is waited for with them.
    _shared: ClassVar[FailureNotice | None] = None

    def __init__(self, store: Store | None, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.failure: Failure | None = None
        self.describe: Callable[[int], str] = "rank {}".format
        self.tear_down: Callable[[], None] = lambda: None
        self.interrupt: Callable[[], None] = lambda: None
        self.is_strict = False
        self._arrived = threading.Event()
        self._noticed = threading.Event()
        self._host_is_gone = False
        self._thread: threading.Thread | None = None
        self._source = store
        if store is None or world_size == 1:
            return
        # A fresh prefix for each notice of a process: the store outlives a strategy.
        generation = store.add(f"pipeline_failure/rank{rank}", 1)
        # A store connection serves one call at a time, so the blocked watcher has its own, and writing another.
        prefix = f"pipeline_failure/{generation}"
        self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._watched = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._watched.set_timeout(FOREVER)
        self._thread = threading.Thread(target=self._watch, name="pipeline-failure-notice", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that wakes up in a finalising interpreter would abort it

    @classmethod
    def shared(cls, store: Store, *, rank: int, world_size: int) -> FailureNotice:
        """This process's notice over `store`, or a new one where there is none or the run has failed."""
        notice = cls._shared
        if notice is None or notice._source is not store or notice._thread is None or notice.failure is not None:
            if notice is not None:
                notice.close()
            notice = cls._shared = cls(store, rank=rank, world_size=world_size)
        return notice

    def publish(self, error: BaseException) -> None:
        """Tell every rank that this one failed with `error`; only the first failure of a run counts. Never raises."""
        if self._thread is None or self.failure is not None:
            return
        failure = self._failure_in(error)
        text = json.dumps(asdict(failure))

        def write() -> None:
            first = self._store.compare_set("first", "", text).decode()
            if first == text:
                for rank in range(self.world_size):
                    self._store.set(str(rank), text)
            self.failure = Failure(**json.loads(first))

        _bounded(write, GRACE_S)

    def fail(self, error: BaseException) -> None:
        """Publish `error`, close this rank's connections so that its peers wake up, and let them read why.

        Bounded by some seconds and never raises. Call it on every rank for whatever ends the run, and raise on. Where
        `error` is a consequence of another rank's failure, it will be shown as one line, without a traceback.
        """
        self._noticed.set()
        if _is_broken_connection(error):
            self._arrived.wait(GRACE_S + 1)  # a rank that knows whom it waited for comes first
        self.publish(error)
        failure = self.failure or self._failure_in(error)
        if failure.rank != self.rank and isinstance(error, RuntimeError):
            show_as_line(error, f"[rank{self.rank}]: {self._in_one_line(failure, error)}")
        for act in (self.interrupt, self.tear_down):
            with contextlib.suppress(Exception):
                act()
        if self.rank == 0 and self._thread is not None:  # the store lives in this process
            _bounded(lambda: self._store.wait(["all_read"], timedelta(seconds=LINGER_S)), LINGER_S + 1)
        self.close()

    def close(self) -> None:
        """Stop watching. Never raises."""
        self._noticed.set()
        thread = self._thread
        if thread is None:
            return
        atexit.unregister(self.close)
        if thread.is_alive() and _bounded(lambda: self._store.set(str(self.rank), CLOSED), GRACE_S):
            thread.join(GRACE_S)
        self._thread = None

    def explain(self, error: BaseException, *, waiting_for: str, peer: int, timed_out_after: float | None) -> Exception:
        """The exception to raise when a wait for `peer` (a global rank) broke with `error`.

        Args:
            waiting_for: what and from whom, such as ``"the activations of micro-batch 3 from stage 0 (rank 0)"``.
            timed_out_after: seconds waited if the timeout passed, None if the connection broke.
        """
        me = self.describe(self.rank)
        self._noticed.set()
        if self._thread is not None:
            self._arrived.wait(GRACE_S if timed_out_after is None else 0.0)
        failure = self.failure
        if failure is None and timed_out_after is not None:
            return PipelineTimeoutError(
                f"{me} waited {timed_out_after:g} s for {waiting_for}, and nothing came: the process of rank {peer} "
                f"is stopped, out of step or slower than the timeout. Raise the strategy's `timeout` if it is slow"
            )
        if failure is None:
            failure = self._gone(error, peer)
        message = f"{self._name(failure)} failed: {failure.summary}\n{me} was waiting for {waiting_for}"
        return PeerFailedError(message, failure)

    def _failure_in(self, error: BaseException) -> Failure:
        """What `error` on this rank says about the run."""
        if isinstance(error, PeerFailedError):
            return error.failure
        if _is_broken_connection(error):
            return self._gone(error, 1 - self.rank if self.world_size == 2 else None)
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        frames = traceback.format_exception(type(error), error, error.__traceback__)
        return Failure(self.rank, summary, "".join(frames[-12:]).rstrip())

    def _gone(self, error: BaseException, peer: int | None) -> Failure:
        """The failure of a rank that could not tell any more."""
        # A host that ends in order leaves its store open until all have read its notice.
        culprit = 0 if self._host_is_gone else peer
        reason = "so did the store it hosts" if self._host_is_gone else _without_advice(error)
        return Failure(culprit, f"its process ended or lost its connections ({reason})", is_gone=True)

    def _name(self, failure: Failure) -> str:
        return "a rank" if failure.rank is None else self.describe(failure.rank)

    def _in_one_line(self, failure: Failure, error: RuntimeError) -> str:
        """What to print in place of the traceback of `error`, a consequence of `failure`."""
        if isinstance(error, PeerFailedError):
            return str(error).replace("\n", "; ")
        own = "lost its connections"
        if not _is_broken_connection(error):
            own = f"met {type(error).__name__}: {_without_advice(error)}"
        return f"{self._name(failure)} failed: {failure.summary}; then {self.describe(self.rank)} {own}"

    def _watch(self) -> None:
        try:
            text = self._watched.get(str(self.rank)).decode()
            if text != CLOSED:
                self.failure = Failure(**json.loads(text))
                self._arrived.set()
                if self._watched.add("read", 1) == self.world_size - self.failure.is_gone:
                    self._watched.set("all_read", "")
        except RuntimeError:
            self._host_is_gone = True
        finally:
            self._arrived.set()
        if self.failure is None:
            return
        with contextlib.suppress(Exception):
            self.interrupt()
        if self.failure.rank != self.rank and not self._noticed.wait(PATIENCE_S) and self.is_strict:
            self._end_process(self.failure)

    def _end_process(self, failure: Failure) -> None:
        """End a process whose main thread does not come to know that the run has failed."""
        print(
            f"[rank{self.rank}]: {self._name(failure)} failed: {failure.summary}; {self.describe(self.rank)} had "
            f"not come to know it after {PATIENCE_S:g} s, and ends",
            file=sys.stderr,
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


def _is_broken_connection(error: BaseException) -> bool:
    """Whether `error` is that of a collective whose peer is gone, raised by whoever made it."""
    told = isinstance(error, RuntimeError) and not isinstance(error, PeerFailedError)
    return told and any(words in str(error).lower() for words in BROKEN)


def _without_advice(error: BaseException) -> str:
    """The first sentence of a backend's error, without the place in its source."""
    sentence = str(error).partition("\n")[0].partition(". ")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", sentence)


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
