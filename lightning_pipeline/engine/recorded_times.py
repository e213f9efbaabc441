"""When each rank ran each action of a training step, on one clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.schedules import Action, Kind
from lightning_pipeline.schedules.records import RecordedStep

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


def sent_bytes(pipeline: Pipeline) -> dict[Action, int]:
    """Bytes of each send of this rank in the last observed step, by the programs of its micro-batches.

    Micro-batches that ran event by event are left out.
    """
    sent: dict[Action, int] = {}
    for microbatch, (program, loss) in enumerate(pipeline.ran):
        for stage in pipeline.stages:
            if program is None or stage >= len(program.visits):
                continue
            sends = [strand for strand in program.visits[stage].sends if strand.value >= 0]
            crossing = {Kind.SEND_F: sends, Kind.SEND_B: program.returning(stage, loss)}
            for kind, strands in crossing.items():
                size = sum(program.sent_spec(strand.value).num_bytes for strand in strands)
                if size:
                    sent[Action(kind, stage, microbatch)] = size
    return sent


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
