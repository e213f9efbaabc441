"""When each rank ran each action of a training step, on one clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lightning_pipeline.engine.executor import Span
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.transport import Transport

_EXCHANGES = 5

Gather = Callable[..., Sequence[Sequence[float]]]
"""Called with numbers on every rank of a group; returns every rank's numbers."""


def clock_offset(transport: Transport | None, replicas: Replicas | None = None) -> float:
    """Seconds by which this rank's `time.perf_counter` is ahead of rank 0's.

    Without `replicas`, ahead of the first rank's in this pipeline. All ranks must call it.
    """
    offset = _ahead(_gather_in(transport)) if transport is not None else 0.0
    if replicas is not None:  # by way of the same stage of the first replica
        offset = _ahead(replicas.gather_numbers) + replicas.gather_numbers(offset)[0][0]
    return offset


def _ahead(gather: Gather) -> float:
    """Seconds by which this rank's clock is ahead of that of the first one in `gather`.

    Nobody leaves an exchange before everybody has come to it: so this rank leaves after the first one came, and the
    first one leaves after this rank came, which bounds the difference of the clocks from both sides. Processes of one
    machine have one clock, and clocks of two machines hardly ever agree: where the bounds allow zero, it is zero.
    """
    low, high = -math.inf, math.inf
    came, left = 0.0, math.inf
    for _ in range(_EXCHANGES):
        came_before, came = came, time.perf_counter()
        first_came, first_left_before = gather(came, left)[0]
        left = time.perf_counter()
        high = min(high, left - first_came)
        low = max(low, came_before - first_left_before)
    return 0.0 if low <= 0 <= high else (low + high) / 2


def _gather_in(transport: Transport) -> Gather:
    def gather(*numbers: float) -> Sequence[Sequence[float]]:
        own = torch.tensor(numbers, dtype=torch.float64)
        return [row.tolist() for row in transport.all_gather_vector(own, "the time")]

    return gather


@dataclass
class RecordedStep:
    """One rank's step, in seconds.

    Attributes:
        rank: the global rank.
        actions: with their starts and ends.
        reductions: start and end of the all-reduce of each bucket of gradients, in the order in which they started.
        peak_live: the most activations of virtual stages that were live at once in a step so far.
    """

    rank: int
    actions: list[Span] = field(default_factory=list)
    reductions: list[tuple[float, float]] = field(default_factory=list)
    peak_live: int = 0

    def note_reduction(self, bucket: int, start: float, end: float) -> None:
        """Take what a reducer's `observe` gets, bucket after bucket."""
        self.reductions.append((start, end))

    def moved(self, seconds: float) -> RecordedStep:
        """A copy with all times moved later by `seconds`."""
        actions = [(action, start + seconds, end + seconds) for action, start, end in self.actions]
        reductions = [(start + seconds, end + seconds) for start, end in self.reductions]
        return RecordedStep(self.rank, actions, reductions, self.peak_live)


def gather_recordings(
    recording: RecordedStep, transport: Transport | None, replicas: Replicas | None
) -> list[list[RecordedStep]]:
    """The recordings of all replicas' pipelines, each by stage, on the first rank's clock. All ranks must call it."""
    pipeline = _of_pipeline(recording.moved(-clock_offset(transport, replicas)), transport)
    return replicas.gather_objects(pipeline) if replicas is not None else [pipeline]


def gather_spans(spans: list[Span], transport: Transport | None) -> list[list[Span]]:
    """The recorded actions of every rank of this pipeline, on its first rank's clock. All ranks must call it."""
    recording = RecordedStep(0, spans).moved(-clock_offset(transport))
    return [rank.actions for rank in _of_pipeline(recording, transport)]


def _of_pipeline(recording: RecordedStep, transport: Transport | None) -> list[RecordedStep]:
    """The recordings of all ranks of this pipeline, by stage."""
    if transport is None:
        return [recording]
    ranks = range(len(transport.pipeline_ranks))
    return [transport.broadcast_object(recording, rank, "what was recorded") for rank in ranks]
