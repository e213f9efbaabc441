"""One clock for all ranks, so that what they record can be laid side by side."""

from __future__ import annotations

import time

from lightning_pipeline.runtime.executor import Span
from lightning_pipeline.runtime.transport import Transport

_PINGS = 8


def clock_offset(transport: Transport) -> float:
    """Seconds by which this rank's `time.perf_counter` is ahead of rank 0's, from the quickest of several round trips.

    All ranks must call it.
    """
    if transport.stage == 0:
        for peer in range(1, len(transport.pipeline_ranks)):
            for _ in range(_PINGS):
                transport.recv_object(peer, "a request for the time")
                transport.send_object(time.perf_counter(), peer)
        return 0.0
    best, offset = float("inf"), 0.0
    for _ in range(_PINGS):
        sent = time.perf_counter()
        transport.send_object(None, 0)
        theirs = transport.recv_object(0, "the time on rank 0")
        received = time.perf_counter()
        if received - sent < best:
            best, offset = received - sent, (sent + received) / 2 - theirs
    return offset


def gather_spans(spans: list[Span], transport: Transport | None) -> list[list[Span]]:
    """Every rank's recorded actions, on rank 0's clock. All ranks must call it."""
    if transport is None:
        return [spans]
    offset = clock_offset(transport)
    moved = [(action, start - offset, end - offset) for action, start, end in spans]
    return [
        transport.broadcast_object(moved, rank, "recorded actions") for rank in range(len(transport.pipeline_ranks))
    ]
