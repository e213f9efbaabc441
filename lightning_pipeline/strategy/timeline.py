"""PipelineTimeline: what each rank did and when, as metrics, a picture and a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from typing_extensions import override

from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.recorded_times import RecordedStep, gather_recordings
from lightning_pipeline.schedules import idle_share, measured_costs, recorded_schedule
from lightning_pipeline.schedules.timeline import overlapped_share, save_chrome_trace, save_picture

from .._lightning import Callback, LightningModule, Trainer, rank_zero_info, rank_zero_warn
from .pipeline import pipeline_of
from .session import Session

MAX_ROWS = 32
"""Ranks in a picture: as many replicas as that allows, and at least one."""


class PipelineTimeline(Callback):
    """Records the start and end of every action on every rank, logs metrics of them, and draws the last step.

    All-reduces of gradients over replicas are recorded as well, one for each bucket. Every `every_n_steps` training
    steps the ranks exchange their recordings, on one clock, and log on every rank:

    - ``pipeline/bubble``: the measured share of all ranks' time without computation, 0 to 1, from the first action of
      the step to the last one, so without all-reduces that go on afterwards;
    - ``pipeline/bubble_simulated``: that of the same schedule, simulated with the measured costs, where sends count as
      computation and all micro-batches take equally long. The difference to the measured one is not the schedule's
      fault. With replicas it is the mean, each with its own costs;
    - ``pipeline/reduction_overlap``, with replicas (that hold their parameters whole): the share of the time of
      all-reduces that passes before the last action ends on any rank; the rest makes the step longer;
    - ``pipeline/live_activations/rank0`` and so on: the most activations of virtual stages that the rank held at once;
    - ``pipeline/live_activations_simulated/rank0`` and so on: the same, by the schedule.

    When training ends, rank 0 writes ``timeline.png`` and ``timeline.json`` (Chrome's trace format: open it in
    chrome://tracing or Perfetto) of the last step and prints their paths. They have a row for each stage of the first
    replica, then of the second, and so on: the trace of all replicas, the picture of as many as fit into 32 rows.

    Without this callback nothing is recorded, at no cost. With it, an action takes half a microsecond longer, and each
    logging exchanges messages, half of them to align the clocks: 5 to 10 ms between two processes on CPU, up to 60 ms
    where more processes compete for the cores.

    Args:
        dirpath: folder for the files; default: the Trainer's log folder.
        filename: their name without extension.
        every_n_steps: optimizer steps between logs; default: the Trainer's ``log_every_n_steps``.

    Raises:
        ValueError: `every_n_steps` is not a whole number from 1.
    """

    def __init__(
        self, dirpath: str | Path | None = None, filename: str = "timeline", every_n_steps: int | None = None
    ) -> None:
        if every_n_steps is not None and (not isinstance(every_n_steps, int) or every_n_steps < 1):
            raise ValueError(
                f"every_n_steps is a whole number from 1, or None for the Trainer's log_every_n_steps; "
                f"got {every_n_steps!r}"
            )
        self.dirpath = dirpath
        self.filename = filename
        self.every_n_steps = every_n_steps
        self.bubble: float | None = None
        """The measured bubble of the last step that was logged."""
        self.recorded: RecordedStep | None = None
        """This rank's recording of the last step, on its own clock."""
        self._last_step = 0
        self._recording = RecordedStep(0)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        strategy = pipeline_of(trainer)
        if strategy is not None:
            strategy.observers.add(self._note_action)
            strategy.observe_buckets = self._note_reduction

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._recording = RecordedStep(trainer.global_rank)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = pipeline_of(trainer)
        if strategy is None:
            return
        self.recorded = self._recording
        self.recorded.peak_live = strategy.session.pipeline.peak_live
        # Batches within an accumulation window are no optimizer steps.
        step, is_step = trainer.global_step, trainer.global_step != self._last_step
        self._last_step = step
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if is_step and every and step % every == 0 and self.recorded.actions:
            _, metrics = self._exchange(strategy.session, self.recorded)
            pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = pipeline_of(trainer)
        if strategy is None:
            rank_zero_info("PipelineTimeline draws nothing: the Trainer does not use the pipeline strategy")
            return
        strategy.observers.discard(self._note_action)
        strategy.observe_buckets = None
        dirpath = Path(strategy.broadcast(self.dirpath or trainer.log_dir or trainer.default_root_dir))
        if self.recorded is None or not self.recorded.actions:
            return
        recorded, metrics = self._exchange(strategy.session, self.recorded)
        if trainer.is_global_zero:
            self._write(recorded, dirpath, metrics["pipeline/bubble_simulated"])

    def _note_action(self, span: Span) -> None:
        self._recording.actions.append(span)

    def _note_reduction(self, bucket: int, start: float, end: float) -> None:
        self._recording.note_reduction(bucket, start, end)

    def _exchange(self, session: Session, own: RecordedStep) -> tuple[list[list[RecordedStep]], dict[str, float]]:
        """All ranks' recordings, by replica and stage, and the metrics. All ranks must call it."""
        # All ranks log: metrics that callbacks monitor have to be the same everywhere.
        recorded = gather_recordings(own, session.transport, session.replicas)
        metrics = timeline_metrics(recorded, session.pipeline.placement)
        self.bubble = metrics["pipeline/bubble"]
        return recorded, metrics

    def _write(self, recorded: Sequence[Sequence[RecordedStep]], dirpath: Path, simulated: float) -> None:
        dirpath.mkdir(parents=True, exist_ok=True)
        trace = write_chrome_trace(recorded, dirpath / f"{self.filename}.json")
        picture = draw_timeline(recorded, dirpath / f"{self.filename}.png")
        rank_zero_info(
            f"Timeline of the last training step (bubble {self.bubble:.1%}, simulated {simulated:.1%}): {picture} "
            f"and, for chrome://tracing, {trace}"
        )


def timeline_metrics(recorded: Sequence[Sequence[RecordedStep]], placement: Sequence[int]) -> dict[str, float]:
    """The numbers that `PipelineTimeline` logs, by name.

    Args:
        recorded: each rank's recording, by replica and stage.
        placement: the rank in the pipeline of each virtual stage.
    """
    pipelines = [[rank.actions for rank in pipeline] for pipeline in recorded]
    timeline = [row for pipeline in pipelines for row in pipeline]
    reductions = [rank.reductions for pipeline in recorded for rank in pipeline]
    # Replicas may differ in speed, and in the schedule that "auto" has chosen.
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


def write_chrome_trace(recorded: Sequence[Sequence[RecordedStep]], path: Path) -> Path:
    """Write a trace of all ranks' recordings. Returns `path`."""
    ranks = [rank for pipeline in recorded for rank in pipeline]
    return save_chrome_trace(
        [rank.actions for rank in ranks],
        path,
        reductions=[rank.reductions for rank in ranks],
        labels=_labels(recorded),
    )


def draw_timeline(recorded: Sequence[Sequence[RecordedStep]], path: Path) -> Path | None:
    """Draw the recordings of the first replicas. Returns `path`, or None where matplotlib is not installed."""
    num_shown = max(1, MAX_ROWS // len(recorded[0]))
    shown = [rank for pipeline in recorded[:num_shown] for rank in pipeline]
    title = "last training step"
    if num_shown < len(recorded):
        title += f", {num_shown} of {len(recorded)} replicas"
    try:
        return save_picture(
            [[(action, start * 1e3, end * 1e3) for action, start, end in rank.actions] for rank in shown],
            path,
            title=title,
            time_label="milliseconds",
            reductions=[[(start * 1e3, end * 1e3) for start, end in rank.reductions] for rank in shown],
            labels=_labels(recorded)[: len(shown)],
        )
    except ModuleNotFoundError as error:
        rank_zero_warn(f"the timeline is not drawn: {error}")
        return None


def _labels(recorded: Sequence[Sequence[RecordedStep]]) -> list[str]:
    """The names of the rows."""
    if len(recorded) == 1:
        return [f"rank {rank.rank}" for rank in recorded[0]]
    return [
        f"rank {rank.rank} (replica {replica}, {_stages(rank)})"
        for replica, pipeline in enumerate(recorded)
        for rank in pipeline
    ]


def _stages(rank: RecordedStep) -> str:
    """``"stage 1"``, or ``"stages 1, 3"`` of a rank with several virtual stages."""
    stages = sorted({action.stage for action, _, _ in rank.actions})
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
