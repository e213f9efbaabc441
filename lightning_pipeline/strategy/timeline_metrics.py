"""What a recorded step comes to in numbers, measured and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from lightning_pipeline.runtime.recording import Recording
from lightning_pipeline.schedules import idle_share, measured_costs, recorded_schedule
from lightning_pipeline.schedules.timeline import overlapped_share


def timeline_metrics(recorded: Sequence[Sequence[Recording]], placement: Sequence[int]) -> dict[str, float]:
    """The numbers that :class:`PipelineTimeline` logs, by name.

    Args:
        recorded: what each rank recorded, by replica and by stage.
        placement: for each virtual stage, the stage that holds it.
    """
    pipelines = [[rank.actions for rank in pipeline] for pipeline in recorded]
    timeline = [row for pipeline in pipelines for row in pipeline]
    reductions = [rank.reductions for pipeline in recorded for rank in pipeline]
    # Replicas may differ in speed, and in the schedule that "auto" chose.
    simulations = [
        measured_costs([pipeline], placement).simulate(recorded_schedule(pipeline, placement)) for pipeline in pipelines
    ]
    metrics = {
        "pipeline/bubble": idle_share(timeline),
        "pipeline/bubble_simulated": fmean(simulation.bubble for simulation in simulations),
    }
    if any(reductions):
        metrics["pipeline/reduction_overlap"] = overlapped_share(timeline, reductions)
    for pipeline, simulation in zip(recorded, simulations, strict=True):
        for rank, simulated in zip(pipeline, simulation.peak_live, strict=True):
            metrics[f"pipeline/live_activations/rank{rank.rank}"] = float(rank.peak_live)
            metrics[f"pipeline/live_activations_simulated/rank{rank.rank}"] = float(simulated)
    return metrics
