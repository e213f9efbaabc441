"""Mail: short messages to ranks, over the store that all share."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from lightning_pipeline.runtime.store import BoundedStore


class Mail:
    """One rank's end. Each rank's messages arrive in one order, whoever wrote them.

    Args:
        store: over a connection that no wait of another thread holds.
    """

    def __init__(self, store: BoundedStore) -> None:
        self.store = store
        self._read = 0
        self._known: Counter[int] = Counter()

    def send(self, rank: int, message: str) -> None:
        """Send a message that nobody else sends to this rank."""
        while self.store.set_first(f"{rank}/{self._known[rank]}", message) != message:
            self._known[rank] += 1

    def next(self, rank: int, timeout: timedelta) -> str | None:
        """The rank's next message; None if none came within the timeout."""
        key = f"{rank}/{self._read}"
        if not self.store.wait([key], timeout, limit=self.store.limit):
            return None
        self._read += 1
        return self.store.get(key)


class RollCall:
    """Asks ranks for an answer, which whoever reads their mail gives: ``store.set(f"{call}/{rank}", "")``."""

    def __init__(self, mail: Mail, ranks: Iterable[int]) -> None:
        self._store = mail.store
        self._name = f"call {uuid.uuid4().hex}"
        self._missing = list(ranks)
        for rank in self._missing:
            mail.send(rank, json.dumps({"call": self._name}))

    def missing(self) -> list[int]:
        """Ranks that have not answered, and have not closed their mail."""
        keys = (f"{self._name}/{{}}", "closed/{}")
        self._missing = [rank for rank in self._missing if not any(self._store.check(key.format(rank)) for key in keys)]
        return self._missing
