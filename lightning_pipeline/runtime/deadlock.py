"""Finds out that ranks wait for one another, within seconds rather than after the timeout.

They do where their code has gone different ways, for instance by the clock. Each rank notes what it waits for. A thread
looks every few seconds, and writes what lasts into the store, with how many messages have gone each way::

    rank 0   waits for message 8 from rank 1        rank 0   has sent 5 messages to rank 1
    rank 1   waits for message 6 from rank 0        rank 1   has sent 7 messages to rank 0

As neither message has been sent, and who waits sends none, nobody can go on. Slow messages are not mistaken for that:
they have been sent and have not come, whatever time they take.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning_pipeline.runtime.store import BoundedStore
from lightning_pipeline.runtime.streams import Stream

LOOK_S = 5.0
"""Between two looks. A wait that two of them see is written to the store, and ranks wait for one another once two looks
have found the same."""
_LONGEST = 16
"""Ranks of a circle; looking for longer ones would keep the store busy."""
_WAY_OUT = (
    "Their code has gone different ways, as it does by the clock, os.environ, or the order of a set: go by values of "
    "the step, by self.global_rank, or by the trainer's max_time. If it does not, please report this"
)


class _Wait(NamedTuple):
    """What a rank waits for.

    Attributes:
        what: in words, with a preposition.
        rank: from whom a message is to come; None if all ranks are to come.
        route: the name of the message's stream.
    """

    what: str
    rank: int | None
    route: str


class Waits:
    """What this rank's main thread waits for, and whether anybody can still end that.

    Args:
        name: of a rank, in messages.

    Attributes:
        message: tells of a deadlock that this rank is in, once it is known; whoever waits looks here now and then.
    """

    def __init__(self, rank: int, name: Callable[[int], str]) -> None:
        self.message = ""
        self._rank = rank
        self._name = name
        self._thread = threading.get_ident()
        self._streams: dict[tuple[int, str], Stream] = {}
        self._num_transports = 0
        self._current: _Wait | None = None
        self._num_for_all = 0
        self._seen: _Wait | None = None
        self._num_looks = self._num_waits = 0
        self._written = self._found = ""

    def add(self, streams: Mapping[tuple[int, int], Stream]) -> None:
        """Watch a transport's streams, by (rank, number). All ranks add theirs in the same order."""
        watched = {key: stream for key, stream in self._streams.items() if not stream.is_closed}
        for (rank, number), stream in streams.items():
            stream.route = f"{self._num_transports}/{number}"
            watched[rank, stream.route] = stream
        self._num_transports += 1
        self._streams = watched  # at once, as another thread looks

    @contextmanager
    def for_message(self, what: str, rank: int | None, route: str) -> Iterator[None]:
        """Wraps a wait for a message. Those of other threads are not looked at, as a rank may go on beside them."""
        if threading.get_ident() != self._thread:
            yield
            return
        around, self._current = self._current, _Wait(what, rank, route)
        try:
            yield
        finally:
            self._current = around

    @contextmanager
    def for_all(self, what: str) -> Iterator[None]:
        """Wraps a wait until every rank of the run comes to the same call."""
        self._num_for_all += threading.get_ident() == self._thread
        with self.for_message(f"{what} with", None, ""):
            yield

    # -- in a thread of its own ---------------------------------------------------------------------------------------

    def look(self, store: BoundedStore) -> None:
        """Look for a deadlock that this rank is in. Call it every `LOOK_S` seconds."""
        wait = self._current
        if wait is not self._seen or wait is None:
            self._seen, self._found, self._num_looks = wait, "", 0
            self._num_waits += 1
            self._write(store, "")
            return
        self._num_looks += 1
        self._write(store, json.dumps(self._own(wait)))
        is_due = self._num_looks & (self._num_looks - 1) == 0  # more and more rarely
        if wait.rank is None or not (is_due or self._found):
            return
        circle = self._circle(store)
        found = "".join(f"{rank} {one['serial']} " for rank, one in circle)
        if found and found == self._found and wait is self._current:
            told = "; ".join(f"{self._name(rank)} waits for {self._described(one)}" for rank, one in circle)
            self.message = f"these ranks wait for one another, and none of them can go on: {told}. {_WAY_OUT}"
        self._found = found

    def _write(self, store: BoundedStore, text: str) -> None:
        if text != self._written:
            store.set(f"waits/{self._rank}", text)
            self._written = text

    def _own(self, wait: _Wait) -> dict[str, Any]:
        awaited = None if wait.rank is None else self._streams.get((wait.rank, wait.route))
        return {
            "serial": self._num_waits,
            "what": wait.what,
            "rank": wait.rank,
            "route": wait.route,
            "num_received": 0 if awaited is None else awaited.num_received,
            "num_sent": {f"{rank}/{route}": stream.num_sent for (rank, route), stream in self._streams.items()},
            "num_for_all": self._num_for_all,
        }

    def _described(self, one: Mapping[str, Any]) -> str:
        return f"{one['what']} {'all ranks' if one['rank'] is None else self._name(one['rank'])}"

    def _circle(self, store: BoundedStore) -> list[tuple[int, dict[str, Any]]]:
        """Ranks that wait for one another, with what they wait for, in the order of their numbers."""
        path: dict[int, dict[str, Any]] = {}
        rank: int | None = self._rank
        while rank is not None and rank not in path:
            key = f"waits/{rank}"
            text = store.get(key) if len(path) < _LONGEST and store.check(key) else ""
            if not text:  # it goes on, as far as anybody knows
                return []
            path[rank] = one = json.loads(text)
            awaited = one["rank"]
            if awaited is None:
                behind = (rank for rank, other in path.items() if other["num_for_all"] < one["num_for_all"])
                awaited = next(behind, None)
            rank = awaited
        ranks = list(path)
        circle = {one: path[one] for one in ranks[ranks.index(rank) :]} if rank is not None else {}
        for waiting, one in circle.items():
            if one["rank"] is not None:
                num_sent = path[one["rank"]]["num_sent"].get(f"{waiting}/{one['route']}")
                if num_sent != one["num_received"]:  # a message is on its way
                    return []
        return sorted(circle.items()) if self._rank in circle else []
