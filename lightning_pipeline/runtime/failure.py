"""Failure notices, by which all ranks learn that one of them failed, and why."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from types import TracebackType
from typing import ClassVar

from torch.distributed import Store

from lightning_pipeline.runtime import deadlock
from lightning_pipeline.runtime.errors import (
    STOPPED,
    Failure,
    PeerFailedError,
    PipelineTimeoutError,
    is_broken_connection,
    is_late,
    without_advice,
)
from lightning_pipeline.runtime.store import GRACE_S, BoundedStore, Mail, RollCall, StoreLostError


def show_as_line(error: BaseException, line: str) -> None:
    """If `error` ends this process, print `line` in place of a traceback. The exit code stays 1."""
    show = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is error:
            print(line, file=sys.stderr, flush=True)
        else:
            show(kind, raised, trace)

    sys.excepthook = hook


LINGER_S = 3.0  # how long the store's host stays so that the others can read its notice
PATIENCE_S = 5.0  # how long the main thread of a rank may go on after another rank failed
PERIOD_S = 60.0  # the longest between two checks of whether the others are alive
FOREVER = timedelta(days=20)  # torch's store counts milliseconds in 31 bits
CLOSED = "{}"
_RESERVE = 1 << 20  # bytes that are freed when memory has run out, so that the failure can be told


class FailureNotice:
    """Tells all ranks of the first failure of any of them, through the store of the process group.

    A daemon thread reads this rank's mail in the store. So the reason is known here before broken connections wake the
    main thread, and waiting for it costs nothing. The thread also answers roll calls, which tell a rank whose process
    is gone or stopped from those that wait for it. A second thread sends it a message once a minute, because a wait of
    torch's store that times out instead prints a warning. Every rank makes its notices in the same order.

    Once a run has failed, nothing here starts a thread or needs much memory: it may have failed for want of these.

    Args:
        store: the default process group's store, or a PrefixStore around it. Unused with one rank.
        rank: this process, of `world_size`.
        timeout: how long the process of a rank may be stopped, if `is_watching`.

    Attributes:
        failure: the first failure of the run, once it is known here.
        waits: what this rank waits for.
        describe: names a rank in messages.
        tear_down: closes this rank's connections.
        interrupt: ends work on the device that waits for a failed rank.
        is_strict: end this process some seconds after another rank failed if the main thread has not noticed: it may
            compute, read data or wait for something that is not ours.
        is_watching: a run is underway. Rank 0 calls the roll of the others, and rank 1 that of rank 0, as ranks may
            wait without a timeout, for instance in Lightning while one of them prepares data.
    """

    # Connections outlive a strategy, and so does the notice that belongs to them.
    _shared: ClassVar[FailureNotice | None] = None

    def __init__(self, store: Store | None, *, rank: int, world_size: int, timeout: timedelta = FOREVER) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.failure: Failure | None = None
        self.waits = deadlock.Waits(rank, lambda number: self.describe(number))
        self.describe: Callable[[int], str] = "rank {}".format
        self.tear_down: Callable[[], None] = lambda: None
        self.interrupt: Callable[[], None] = lambda: None
        self.is_strict = False
        self.is_watching = False
        self._arrived = threading.Event()
        self._noticed = threading.Event()
        self._is_over = threading.Event()
        self._has_failed = False
        self._host: StoreLostError | None = None
        self._thread: threading.Thread | None = None
        self._interrupter: threading.Thread | None = None
        self._ticker: threading.Thread | None = None
        self._root = getattr(store, "_underlying_non_prefix_store", store)
        self._reserve: bytearray | None = None
        if store is None or world_size == 1:
            return
        shared = BoundedStore(store, rank=rank, limit=timeout)
        # The store outlives a strategy, so each notice of a process has its own prefix.
        generation = shared.add(f"pipeline_failure/rank{rank}", 1)
        # A connection serves one call at a time, so each thread has its own.
        self._store, inbox, ticks = (shared.clone().under(f"pipeline_failure/{generation}") for _ in range(3))
        self._mail, self._inbox, self._ticks = Mail(self._store), Mail(inbox), Mail(ticks)
        self._reserve = bytearray(_RESERVE)
        self._thread = threading.Thread(target=self._read, name="pipeline-failure-notice", daemon=True)
        self._thread.start()
        self._interrupter = threading.Thread(target=self._interrupt, name="pipeline-failure-interrupt", daemon=True)
        self._interrupter.start()
        self._ticker = threading.Thread(target=self._tick, name="pipeline-failure-clock", daemon=True)
        self._ticker.start()
        atexit.register(self.close)  # a thread that wakes up while the interpreter finalises would abort it

    @classmethod
    def shared(cls, store: Store, *, rank: int, world_size: int, timeout: timedelta) -> FailureNotice:
        """This process's notice over `store`, or a new one if there is none or its run has failed."""
        notice = cls._shared
        root = getattr(store, "_underlying_non_prefix_store", store)
        if notice is None or notice._root is not root or notice._thread is None or notice.failure is not None:
            if notice is not None:
                notice.close()
            notice = cls._shared = cls(store, rank=rank, world_size=world_size, timeout=timeout)
        if notice.timeout != timeout:
            notice.timeout = timeout
            for own in (notice._store, notice._inbox.store, notice._ticks.store):
                own.put_limit(timeout)
        return notice

    # -- telling ----------------------------------------------------------------------------------------------------

    def publish(self, error: BaseException) -> None:
        """Tell every rank that this one failed with `error`, unless another failed before. Never raises."""
        if self._thread is None or self.failure is not None:
            return
        self._reserve = None
        try:
            failure = self._failure_in(error)
        except Exception:  # the error cannot even be printed
            failure = Failure(self.rank, type(error).__name__)
        self.report(failure)

    def report(self, failure: Failure) -> None:
        """Tell every rank of a failure of any rank, unless there was one before. Never raises."""
        if self._thread is None or self.failure is not None:
            return
        with contextlib.suppress(Exception):
            self._store.hurry()
            try:
                text = json.dumps(asdict(failure))
            except MemoryError:
                text = json.dumps(asdict(replace(failure, traceback="")))
            first = self._store.set_first("first", text)
            if first == text:
                for rank in range(self.world_size):
                    self._mail.send(rank, text)
            self.failure = Failure(**json.loads(first))

    def fail(self, error: BaseException) -> None:
        """Publish `error`, close this rank's connections so that its peers wake up, and let them read why.

        It takes some seconds at most and never raises. Every rank calls it with whatever ends its run, and raises it
        then. An `error` that follows from another rank's failure, or that other ranks have as well because all run the
        user's code, will be shown as one line without a traceback.
        """
        self._noticed.set()
        self.is_watching = False
        self.publish(error)
        with contextlib.suppress(Exception):
            own = self._failure_in(error)
            failure = self.failure or own
            if failure.rank != self.rank and (own.rank, own.summary) == (self.rank, failure.summary):
                show_as_line(error, f"[rank{self.rank}]: {failure.summary}, as on {self._name(failure)}")
            elif failure.rank != self.rank and isinstance(error, RuntimeError):
                show_as_line(error, f"[rank{self.rank}]: {self._in_one_line(failure, error)}")
        if self._end_device_work():
            with contextlib.suppress(Exception):
                self.tear_down()
        if self.rank == 0 and self._thread is not None:  # this process may host the store
            with contextlib.suppress(Exception):
                self._store.wait(["all_read"], timedelta(seconds=LINGER_S))
        self.close()

    def close(self) -> None:
        """Stop watching. Never raises."""
        self._noticed.set()
        self.is_watching = False
        thread, self._thread = self._thread, None
        if thread is None or self._interrupter is None or self._ticker is None:
            return
        atexit.unregister(self.close)
        try:
            self._store.hurry()
            self._store.set(f"closed/{self.rank}", "")
            self._mail.send(self.rank, CLOSED)
        except Exception:
            self._inbox.store.shut_down()  # the last resort, as torch prints a stack trace of its own then
        thread.join(GRACE_S)
        self._is_over.set()
        self._interrupter.join(GRACE_S)
        self._ticker.join(GRACE_S)

    # -- knowing ----------------------------------------------------------------------------------------------------

    def explain(
        self, error: BaseException, *, waiting_for: str, peer: int | None, timed_out_after: float | None
    ) -> Exception:
        """The exception to raise after a wait for `peer` (a global rank) ended with `error`.

        Args:
            waiting_for: what and from whom, such as ``"the activations of micro-batch 3 from stage 0 (rank 0)"``.
            peer: None for a collective, which does not tell for whom it waited.
            timed_out_after: seconds waited if the timeout passed, None if the connection broke.
        """
        me = self.describe(self.rank)
        self._noticed.set()
        if timed_out_after is not None and self.failure is None:
            absent = self.absent()
            if self.failure is None:
                reason = self._reason(absent, peer)
                return PipelineTimeoutError(f"{me} waited {timed_out_after:g} s for {waiting_for}, {reason}")
        failure = self.failure or self._gone(error, peer)
        message = f"{self._name(failure)} failed: {failure.summary}\n{me} was waiting for {waiting_for}"
        return PeerFailedError(message, failure)

    def absent(self) -> list[int]:
        """Call the roll. Returns ranks that do not answer, whose processes are gone or stopped. Never raises.

        It takes some seconds, unless a failure becomes known meanwhile.
        """
        if self._thread is None:
            return []
        with contextlib.suppress(RuntimeError):
            try:
                self._store.hurry()
                call = RollCall(self._mail, [rank for rank in range(self.world_size) if rank != self.rank])
                deadline = time.monotonic() + GRACE_S
                while missing := call.missing():
                    if self._arrived.wait(0.05) or time.monotonic() > deadline:
                        break
            except StoreLostError as error:
                self._host = error
                return [] if error.failure.rank is None else [error.failure.rank]
            return missing if self.failure is None else []
        return []

    def _reason(self, absent: list[int], peer: int | None) -> str:
        """Why something did not come in time, as the end of a message."""
        if absent:
            names = " and ".join(map(self.describe, absent))
            return f"and nothing came: {names} {'does' if len(absent) == 1 else 'do'} not answer: {STOPPED}"
        who = "the process of each rank runs, and one" if peer is None else f"the process of rank {peer} runs, and"
        return (
            f"and nothing came: {who} is stuck, out of step or slower than the timeout. Raise the strategy's `timeout` "
            f"if it is slow"
        )

    def raise_failure(self, waiting_for: str) -> None:
        """Raise if a rank of the run has failed; for a rank that waits."""
        if self.failure is not None:
            raise self.explain(RuntimeError("failed"), waiting_for=waiting_for, peer=None, timed_out_after=None)

    def _failure_in(self, error: BaseException) -> Failure:
        """The failure of the run that an `error` on this rank means."""
        if isinstance(error, PeerFailedError):
            return error.failure
        if is_broken_connection(error):
            return self._gone(error, None)
        if is_late(error) and (absent := self.absent()):
            return Failure(absent[0], f"it did not answer: {STOPPED} ({without_advice(error)})", is_gone=True)
        summary = type(error).__name__
        try:
            summary = traceback.format_exception_only(type(error), error)[-1].strip()
            frames = traceback.format_exception(type(error), error, error.__traceback__)
            return Failure(self.rank, summary, "".join(frames[-12:]).rstrip())
        except MemoryError:
            return Failure(self.rank, summary)

    def _gone(self, error: BaseException, peer: int | None) -> Failure:
        """The failure that broke a connection: what a rank has told, or else that of a rank which could not tell."""
        absent = self.absent()
        if not absent and self._host is None:
            self._arrived.wait(GRACE_S)  # a failing rank tells before it closes connections; its mail may be on its way
        if self.failure is not None:
            return self.failure
        # A host that fails in order keeps its store open until all have read its notice, so this one was killed.
        if self._host is not None:
            return self._host.failure
        if absent:
            summary = f"its process ended or lost its connections ({without_advice(error)})"
            return Failure(peer if peer in absent else absent[0], summary, is_gone=True)
        return Failure(peer, f"its connections broke, though its process runs ({without_advice(error)})")

    def _name(self, failure: Failure) -> str:
        return "a rank" if failure.rank is None else self.describe(failure.rank)

    def _in_one_line(self, failure: Failure, error: RuntimeError) -> str:
        """What to print in place of the traceback of `error`, which follows from `failure`."""
        if isinstance(error, PeerFailedError):
            return str(error).replace("\n", "; ")
        own = "lost its connections"
        if not is_broken_connection(error):
            own = f"met {type(error).__name__}: {without_advice(error)}"
        return f"{self._name(failure)} failed: {failure.summary}; then {self.describe(self.rank)} {own}"

    # -- the reader's thread ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_mail()
        except StoreLostError as error:
            if self._thread is not None:
                self._host = error = self._host or error  # the clock's thread may have ended this one's wait
                if self.is_watching:
                    self.failure = self.failure or error.failure
        except RuntimeError:
            pass  # a timeout of a store that is not remote
        finally:
            self._arrived.set()
        if self.failure is None:
            return
        self._has_failed = True
        self._is_over.set()
        if self.failure.rank != self.rank and not self._noticed.wait(PATIENCE_S) and self.is_strict:
            self._end_process(self.failure)

    def _read_mail(self) -> None:
        """Read mail until it tells of a failure, or this is closed."""
        call: RollCall | None = None
        ticks = 0
        while True:
            text = self._inbox.next(self.rank, FOREVER)
            if text is None:
                continue
            if text == CLOSED:
                if self.failure is not None:  # learned from the store's key before the mail came
                    self._note_reading(self.failure)
                return
            message = json.loads(text)
            if "call" in message:
                self._inbox.store.set(f"{message['call']}/{self.rank}", "")
                continue
            if "tick" not in message:
                self.failure = Failure(**message)
                self._arrived.set()
                self._note_reading(self.failure)
                return
            if not self.is_watching or self.rank > 1:
                call = None
            elif call is None or not (missing := call.missing()):
                # Rank 0 is watched itself, by rank 1, so this never ends.
                call, ticks = RollCall(self._inbox, [0] if self.rank else range(1, self.world_size)), 0
            else:
                ticks += 1  # rather than seconds, which pass even while this process is stopped
                if ticks * self._period() > self.timeout.total_seconds():
                    summary = f"it did not answer within {self.timeout.total_seconds():g} s: {STOPPED}"
                    self.report(Failure(missing[0], summary, is_gone=True))
                    call = None

    def _note_reading(self, failure: Failure) -> None:
        """Tell the store's host that this rank has read why the run failed."""
        if self._inbox.store.add("read", 1) == self.world_size - failure.is_gone:
            self._inbox.store.set("all_read", "")

    def _end_process(self, failure: Failure) -> None:
        """End this process, whose main thread has not noticed that the run failed."""
        with contextlib.suppress(Exception):
            print(
                f"[rank{self.rank}]: {self._name(failure)} failed: {failure.summary}; {self.describe(self.rank)} had "
                f"not come to know it after {PATIENCE_S:g} s, and ends",
                file=sys.stderr,
            )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    # -- the clock's thread -------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Send this rank a message now and then, and find out whether the store's host has stopped, or a deadlock."""
        ticks = itertools.count()
        sent = time.monotonic()
        try:
            while not self._is_over.wait(min(deadlock.LOOK_S, self._period())):
                self.waits.look(self._ticks.store)
                if time.monotonic() - sent >= self._period():
                    sent = time.monotonic()
                    self._ticks.send(self.rank, json.dumps({"tick": next(ticks)}))
        except StoreLostError as error:
            self._host = self._host or error
            self._inbox.store.shut_down()
        except RuntimeError:
            pass  # of a store that is not remote

    def _period(self) -> float:
        return min(PERIOD_S, self.timeout.total_seconds() / 4)

    # -- the interrupter's thread, as a device's backend may take long to abort, or never end --------------------------

    def _interrupt(self) -> None:
        self._is_over.wait()
        if self._has_failed:
            with contextlib.suppress(Exception):
                self.interrupt()

    def _end_device_work(self) -> bool:
        """End what waits for other ranks on the device. Returns whether it has ended; if not, it holds connections."""
        if self._interrupter is None:
            with contextlib.suppress(Exception):
                self.interrupt()
            return True
        self._has_failed = True
        self._is_over.set()
        self._interrupter.join(GRACE_S)
        return not self._interrupter.is_alive()


@contextmanager
def waiting_for(what: str, peer: int | None = None, *, is_for_all: bool = False) -> Iterator[None]:
    """Wraps a collective, so that its errors tell which rank did not come, and what was waited for.

    Args:
        peer: the rank that is waited for, if there is only one.
        is_for_all: every rank of the run makes this call, in the same order with the others of this kind.

    Raises:
        PeerFailedError: another rank failed.
        PipelineTimeoutError: another rank did not come in time.
    """
    notice = FailureNotice._shared
    try:
        with notice.waits.for_all(what) if is_for_all and notice is not None else contextlib.nullcontext():
            yield
    except RuntimeError as error:
        late = is_late(error)
        if notice is None or not (late or is_broken_connection(error)):
            raise
        seconds = notice.timeout.total_seconds() if late else None
        raise notice.explain(error, waiting_for=what, peer=peer, timed_out_after=seconds) from None


def raise_failure() -> None:
    """Raise if a rank of the run has failed; for a rank that waits for others."""
    notice = FailureNotice._shared
    if notice is not None:
        notice.raise_failure("other ranks")
