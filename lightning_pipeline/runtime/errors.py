"""Errors of a rank whose peer failed, disappeared or did not arrive in time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

STOPPED = "its process is stopped, or its machine or the network is gone"
"""What is known of a rank that does not answer."""

# What a rank's collectives say when another's process is gone: Gloo, NCCL, and the system under both.
_BROKEN = ("connection closed", "connection was likely closed", "connection reset", "broken pipe", "process exited")
# And when it does not answer.
_LATE = ("timed out", "timeout")


@dataclass(frozen=True)
class Failure:
    """The first failure of a run: the rank it happened on (None if that is not known), what it said, and whether its
    process is gone."""

    rank: int | None
    summary: str
    traceback: str = ""
    is_gone: bool = False


class PipelineTimeoutError(RuntimeError):
    """A peer did not deliver within the timeout."""


class PeerFailedError(RuntimeError):
    """Another rank raised or died; ``failure`` says which and why, with its traceback if it had one."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


def is_broken_connection(error: BaseException) -> bool:
    """Whether `error` is that of a collective whose peer is gone, raised by whoever made it."""
    return _says(error, _BROKEN)


def is_late(error: BaseException) -> bool:
    """Whether `error` is that of a collective whose peer did not come in time, raised by whoever made it."""
    return _says(error, _LATE) and not is_broken_connection(error)


def without_advice(error: BaseException) -> str:
    """The first sentence of a backend's error, without the place in its source."""
    sentence = str(error).partition("\n")[0].partition(". ")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", sentence)


def ranks(numbers: Iterable[int]) -> str:
    """``"rank 3"``, or ``"ranks 1 3"``."""
    told = [str(number) for number in numbers]
    return f"rank{'s' * (len(told) > 1)} {' '.join(told)}"


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    own = isinstance(error, (PeerFailedError, PipelineTimeoutError))
    return isinstance(error, RuntimeError) and not own and any(word in str(error).lower() for word in words)
