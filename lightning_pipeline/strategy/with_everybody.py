"""What one rank decides, on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Failed:
    message: str


def with_everybody(decide: Callable[[], T], broadcast: Callable[[Any], Any], *, decides: bool) -> T:
    """What the first rank decides. All ranks must call it, and all fail if the first one does.

    Args:
        broadcast: gives every rank what the first one passes.
        decides: whether this is the first rank.

    Raises:
        ValueError: on the other ranks, what the first one failed with; there it raises that itself.
    """
    outcome: Any = None
    failure: Exception | None = None
    if decides:
        try:
            outcome = decide()
        except Exception as error:
            failure = error
            outcome = _Failed(f"{type(error).__name__}: {error}")
    outcome = broadcast(outcome)
    if failure is not None:
        raise failure
    if isinstance(outcome, _Failed):
        raise ValueError(f"the first rank failed: {outcome.message}")
    return outcome
