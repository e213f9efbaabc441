"""The memory that a schedule takes, from what each virtual stage keeps of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeline.schedules.action import Kind
from lightning_pipeline.schedules.schedule import Schedule


def peak_bytes(
    schedule: Schedule,
    kept: Sequence[float],
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
) -> list[float]:
    """For each rank, the most bytes of activations that it holds at once.

    Args:
        kept: bytes that each virtual stage keeps of a micro-batch from its F to the end of its B or W.
        forward: the most that it takes of the micro-batch during F, what it keeps included; None: no more than that.
        backward: likewise during B or I.
    """
    during = {Kind.F: forward or kept, Kind.B: backward or kept, Kind.I: backward or kept}
    peaks = []
    for order in schedule.compute():
        live = peak = 0.0
        for action in order:
            stage = action.stage
            others = live - kept[stage] * (action.kind is not Kind.F)
            peak = max(peak, live, others + during.get(action.kind, kept)[stage])
            if action.kind is Kind.F:
                live += kept[stage]
            elif action.kind in (Kind.B, Kind.W):
                live -= kept[stage]
        peaks.append(max(peak, live))
    return peaks


def live_activations(schedule: Schedule) -> list[int]:
    """For each virtual stage, the most micro-batches whose activations it holds at once."""
    live = [0] * schedule.num_stages
    peaks = [0] * schedule.num_stages
    for order in schedule.compute():
        for action in order:
            if action.kind is Kind.F:
                live[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], live[action.stage])
            elif action.kind in (Kind.B, Kind.W):
                live[action.stage] -= 1
    return peaks
