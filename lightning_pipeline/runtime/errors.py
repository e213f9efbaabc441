"""Errors of a rank whose peer failed, disappeared or did not come in time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

STOPPED = "its process is stopped, or its machine or the network is gone"
"""Why a rank does not answer, as far as others can tell."""

# Parts of the errors of Gloo, NCCL and the system under both when the process of a peer is gone,
_BROKEN = ("connection closed", "connection was likely closed", "connection reset", "broken pipe", "process exited")
# and when it does not answer.
_LATE = ("timed out", "timeout")


@dataclass(frozen=True)
class Failure:
    """The first failure of a run.

    Attributes:
        rank: where it happened; None if that is not known.
        summary: its exception, in one line.
        is_gone: the process of the rank is gone.
    """

    rank: int | None
    summary: str
    traceback: str = ""
    is_gone: bool = False


class PipelineTimeoutError(RuntimeError):
    """A peer did not send or come within the timeout."""


class PipelineDeadlockError(RuntimeError):
    """Ranks wait for one another."""


class PeerFailedError(RuntimeError):
    """Another rank failed; ``failure`` tells which and why, with its traceback if there was one."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


def is_broken_connection(error: BaseException) -> bool:
    """Whether `error` comes from a collective, of ours or of anybody's, whose peer is gone."""
    return _says(error, _BROKEN)


def is_late(error: BaseException) -> bool:
    """Whether `error` comes from a collective, of ours or of anybody's, whose peer did not come in time."""
    return _says(error, _LATE) and not is_broken_connection(error)


def without_advice(error: BaseException) -> str:
    """The first sentence of a backend's error, without its source location."""
    sentence = str(error).partition("\n")[0].partition(". ")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", sentence)


def ranks(numbers: Iterable[int]) -> str:
    """``"rank 3"``, or ``"ranks 1 3"``."""
    names = [str(number) for number in numbers]
    return f"rank{'s' * (len(names) > 1)} {' '.join(names)}"


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    own = isinstance(error, (PeerFailedError, PipelineTimeoutError))
    return isinstance(error, RuntimeError) and not own and any(word in str(error).lower() for word in words)
