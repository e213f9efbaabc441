"""What the ranks recorded of a training step, brought together."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_pipeline.runtime.clock import clock_offset
from lightning_pipeline.runtime.executor import Span
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.transport import Transport


@dataclass
class Recording:
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

    def moved(self, seconds: float) -> Recording:
        """The same at later times."""
        actions = [(action, start + seconds, end + seconds) for action, start, end in self.actions]
        reductions = [(start + seconds, end + seconds) for start, end in self.reductions]
        return Recording(self.rank, actions, reductions, self.peak_live)


def gather_recordings(
    recording: Recording, transport: Transport | None, replicas: Replicas | None
) -> list[list[Recording]]:
    """The recordings of all replicas' pipelines, each by stage, on the first rank's clock. All ranks must call it."""
    pipeline = _of_pipeline(recording.moved(-clock_offset(transport, replicas)), transport)
    return replicas.gather_objects(pipeline) if replicas is not None else [pipeline]


def gather_spans(spans: list[Span], transport: Transport | None) -> list[list[Span]]:
    """The recorded actions of every rank of this pipeline, on its first rank's clock. All ranks must call it."""
    recording = Recording(0, spans).moved(-clock_offset(transport))
    return [rank.actions for rank in _of_pipeline(recording, transport)]


def _of_pipeline(recording: Recording, transport: Transport | None) -> list[Recording]:
    """The recordings of all ranks of this pipeline, by stage."""
    if transport is None:
        return [recording]
    ranks = range(len(transport.pipeline_ranks))
    return [transport.broadcast_object(recording, rank, "what was recorded") for rank in ranks]
