"""Data from which a run goes on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader


class ResumableLoader:
    """A loader with a state, which Lightning saves and restores."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.start = self.num_given = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.num_given, self.start = self.start, 0
        for batch in islice(self.loader, self.num_given, None):
            self.num_given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start = state_dict["num_given"] % len(self.loader)
