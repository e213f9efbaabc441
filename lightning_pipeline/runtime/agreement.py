"""Compares settings of all ranks before they wait for one another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import timedelta

from lightning_pipeline.runtime.errors import STOPPED, PeerFailedError, PipelineTimeoutError, ranks
from lightning_pipeline.runtime.failure import LINGER_S, FailureNotice
from lightning_pipeline.runtime.store import BoundedStore, StoreLostError

SAME = "start all of them with the same script, arguments, data and packages"


class Agreement:
    """The comparisons of one run. All ranks make it at the same point, and compare at the same points.

    Rank 0 collects the facts of all ranks and answers with a verdict, so a comparison costs a rank two messages. They
    go through the store, as ranks that disagree might not even make the same process groups.

    Args:
        store: shared by all ranks; rank 0's process may host it.
        timeout: the longest that the ranks wait for the slowest one.
        notice: tells of ranks that failed or do not answer.
    """

    def __init__(
        self, store: BoundedStore, rank: int, world_size: int, timeout: timedelta, notice: FailureNotice
    ) -> None:
        run = store.add(f"agreement/rank{rank}", 1)  # the store outlives a run, so each run has its own prefix
        self._store = store.under(f"agreement/{run}")
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._notice = notice
        self._turn = self._num_ends = 0

    def check(self, place: str, facts: Mapping[str, str], *, way_out: str = SAME, is_last: bool = False) -> None:
        """Wait until all ranks have called this and agree; else raise on all of them, and compare no more.

        Args:
            place: this point of the run, such as "the start of training". Ranks at different points do not agree.
            facts: what has to be equal on all ranks that name it: ``{"torch": "2.13.0", "num_microbatches": "8"}``.
            way_out: the end of the error, which tells what to do.
            is_last: whether the process may end after this.

        Raises:
            ValueError: ranks differ; it tells in what, which ranks, and the values.
            PeerFailedError: another rank failed before it came here.
            PipelineTimeoutError: a rank did not come here in time.
        """
        try:
            verdict = self._compare(place, facts, way_out, is_last=is_last)
        except StoreLostError as error:
            self._raise_if_failed(place)  # the host closes its store once all know why the run has failed
            raise PeerFailedError(f"{error}\nrank {self._rank} had come to {place}", error.failure) from None
        for kind, text in verdict.items():
            raise {"late": PipelineTimeoutError, "differing": ValueError}[kind](text)

    def came_alike(self, place: str, limit: timedelta) -> bool:
        """Whether all ranks come to the same place within a short time. Never raises."""
        self._num_ends += 1
        keys = [f"end{self._num_ends}/{rank}" for rank in range(self._world_size)]
        with contextlib.suppress(Exception):
            self._store.set(keys[self._rank], place)
            if self._store.wait_looking(keys, limit, lambda: self._raise_if_failed(place)):
                return len(set(self._store.multi_get(keys))) == 1
        return False

    def _compare(self, place: str, facts: Mapping[str, str], way_out: str, *, is_last: bool) -> dict:
        """The verdict: {} if all ranks agree."""
        self._turn += 1
        self._store.set(f"{self._turn}/{self._rank}", json.dumps({"place": place, "facts": dict(facts)}))
        if self._rank == 0:
            verdict = self._judge(place, way_out)
            self._store.set(f"{self._turn}/verdict", json.dumps(verdict))
        else:
            verdict = self._hear(place)
        if verdict or is_last:
            self._leave()
        return verdict

    def _judge(self, place: str, way_out: str) -> dict:
        """Rank 0's verdict: {} if all ranks agree."""
        keys = [f"{self._turn}/{rank}" for rank in range(self._world_size)]
        if not self._wait(keys, self._timeout, place):
            late = [rank for rank, key in enumerate(keys) if not self._store.check(key)]
            limit = self._timeout.total_seconds()
            message = f"{ranks(late)} did not come to {place} within {limit:g} s, and the others waited for it"
            if absent := self._notice.absent():
                message += f"; {ranks(absent)} {'does' if len(absent) == 1 else 'do'} not answer: {STOPPED}"
            return {"late": message}
        said = [json.loads(text) for text in self._store.multi_get(keys)]
        if places := _differing([one["place"] for one in said]):
            return {"differing": f"the ranks are at different points of the run ({places}); {way_out}"}
        names = dict.fromkeys(name for one in said for name in one["facts"])
        values = {name: _differing([one["facts"].get(name) for one in said]) for name in names}
        values = {name: differing for name, differing in values.items() if differing}
        if not values:
            return {}
        message = "; ".join(f"{name}: {differing}" for name, differing in values.items())
        return {"differing": f"the ranks do not agree on {', '.join(values)} ({message}); {way_out}"}

    def _hear(self, place: str) -> dict:
        key = f"{self._turn}/verdict"
        # Rank 0 itself may wait that long for others, and then tells which.
        limit = self._timeout + timedelta(seconds=LINGER_S)
        if self._wait([key], limit, place):
            return json.loads(self._store.get(key))
        raise PipelineTimeoutError(
            f"rank 0 did not come to {place} within {limit.total_seconds():g} s, and rank {self._rank} waited for it"
        )

    def _wait(self, keys: list[str], timeout: timedelta, place: str) -> bool:
        """Whether the keys came within the timeout. Raises if another rank has failed."""
        with self._notice.waits.for_all(place):
            return self._store.wait_looking(keys, timeout, lambda: self._raise_if_failed(place))

    def _raise_if_failed(self, place: str) -> None:
        failure = self._notice.failure
        if failure is not None and failure.rank != self._rank:
            name = "a rank" if failure.rank is None else f"rank {failure.rank}"
            raise PeerFailedError(f"{name} failed before it came to {place}: {failure.summary}", failure)

    def _leave(self) -> None:
        """Tell that this rank needs the store no longer. Rank 0, which may host it, waits a while for the others."""
        if self._rank:
            if self._store.add("left", 1) == self._world_size - 1:
                self._store.set("all have left", "")
        elif self._world_size > 1:
            with contextlib.suppress(RuntimeError):
                self._store.wait(["all have left"], timedelta(seconds=LINGER_S))


def _differing(values: list[str | None]) -> str:
    """Each value with its ranks, or "" if all are equal. None does not count as a value."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            by_value.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {ranks(own)}" for value, own in by_value.items()) if len(by_value) > 1 else ""
