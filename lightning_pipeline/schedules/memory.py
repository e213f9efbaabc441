"""The memory that a schedule takes, from what each virtual stage keeps of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeline.schedules.action import Kind
from lightning_pipeline.schedules.schedule import Schedule


def peak_bytes(schedule: Schedule, kept: Sequence[float]) -> list[float]:
    """For each rank, the most bytes of activations that it holds at once.

    Args:
        kept: bytes that each virtual stage keeps of a micro-batch from its F to the end of its B or W.
    """
    peaks = []
    for order in schedule.compute():
        live = peak = 0.0
        for action in order:
            if action.kind is Kind.F:
                live += kept[action.stage]
                peak = max(peak, live)
            elif action.kind in (Kind.B, Kind.W):
                live -= kept[action.stage]
        peaks.append(peak)
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
