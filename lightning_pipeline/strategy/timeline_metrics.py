"""What a recorded step comes to in numbers, measured and simulated."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeline.schedules import Timeline, idle_share, measured_costs, recorded_schedule


def timeline_metrics(
    timeline: Timeline, placement: Sequence[int], live_activations: Sequence[int] = ()
) -> dict[str, float]:
    """The numbers that :class:`PipelineTimeline` logs, by name.

    Args:
        timeline: the step, in seconds.
        placement: the rank of each virtual stage.
        live_activations: for each rank, the most that it held at once.
    """
    simulation = measured_costs([timeline], placement).simulate(recorded_schedule(timeline, placement))
    metrics = {"pipeline/bubble": idle_share(timeline), "pipeline/bubble_simulated": simulation.bubble}
    for name, counts in (
        ("live_activations", live_activations),
        ("live_activations_simulated", simulation.peak_live),
    ):
        metrics |= {f"pipeline/{name}/rank{rank}": float(count) for rank, count in enumerate(counts)}
    return metrics
