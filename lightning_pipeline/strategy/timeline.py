"""PipelineTimeline: what each rank did and when, as metrics, a picture and a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from typing_extensions import override

from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.recorded_times import gather_recordings, sent_bytes
from lightning_pipeline.runtime.host_memory import peak_memory
from lightning_pipeline.schedules import idle_share, measured_costs, recorded_schedule
from lightning_pipeline.schedules.live import SUFFIX
from lightning_pipeline.schedules.offloading import away_in
from lightning_pipeline.schedules.records import RecordedStep
from lightning_pipeline.schedules.simulation import peak_bytes
from lightning_pipeline.schedules.timeline import extent, overlapped_share, slowest_stage

from .._lightning import Callback, LightningModule, Trainer, rank_zero_info
from .live_status import LiveStatus
from .pipeline import PipelineStrategy, pipeline_of
from .timeline_files import TimelineFiles, first_microbatch
from .timeline_loggers import log_report


class PipelineTimeline(Callback):
    """Records the start and end of every action on every rank, logs metrics of them, and writes a report.

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
    - ``pipeline/live_activations_simulated/rank0`` and so on: the same, by the schedule;
    - with ``offload_activations`` or ``max_live_bytes`` ``pipeline/live_bytes/rank0`` and so on, the most bytes that
      saved tensors took on the device at once, and ``pipeline/live_bytes_simulated/rank0``, the same by the schedule;
      with the former ``pipeline/host_bytes/rank0``, what the step sent: activations in host memory are not live;
    - ``pipeline/busy/rank0`` and so on: the share of the step in which the rank computes;
    - ``pipeline/slowest_stage``: the virtual stage that computes for the longest time.

    The bubble and the slowest stage are on the progress bar. At the same steps rank 0 appends the recordings to
    ``timeline.jsonl``, from which ``lightning-pipeline report`` and ``watch`` read, of a run that was killed, too. And
    twice a second a thread of each rank writes into ``timeline.live/``, for ``watch``, what the rank is at.

    When training ends, rank 0 writes and prints the paths of:

    - ``report.html``, which any browser shows without a network: each recorded step under a slider, the simulated
      schedule under the measured one, why ranks wait, live activations, and what moving a module would gain. For that
      the first rank runs one micro-batch's step once more, on tensors without data, and undoes what it changes;
    - ``timeline.png`` (with matplotlib) and ``timeline.json`` (Chrome's trace format: open it in chrome://tracing or
      Perfetto) of the last step. They have a row for each stage of the first replica, then of the second, and so on:
      the trace of all replicas, the picture of as many as fit into 32 rows.

    The loggers get the metrics, and the picture and the report as far as they can take them: TensorBoard, W&B, MLflow
    and Comet the picture, the last three the report.

    Without this callback nothing is recorded, at no cost. With it, an action takes 0.6 microseconds longer, the thread
    for ``watch`` 0.14 % of a CPU core, and each logging exchanges messages, half of them to align the clocks: 5 to
    10 ms between two processes on CPU, up to 60 ms where more processes compete for the cores.

    Args:
        dirpath: folder for the files; default: the Trainer's log folder.
        filename: the name of all but the report, without extension.
        every_n_steps: optimizer steps between logs; default: the Trainer's ``log_every_n_steps``.
        picture_every_n_steps: optimizer steps between pictures in the loggers, which take half a second each to draw,
            and are drawn at steps that are logged; default: only the last step's.

    Raises:
        ValueError: one of them is not a whole number from 1, or there are no pictures at steps that are logged.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str = "timeline",
        every_n_steps: int | None = None,
        picture_every_n_steps: int | None = None,
    ) -> None:
        if every_n_steps is not None and (not isinstance(every_n_steps, int) or every_n_steps < 1):
            raise ValueError(
                f"every_n_steps is a whole number from 1, or None for the Trainer's log_every_n_steps; "
                f"got {every_n_steps!r}"
            )
        pictures = picture_every_n_steps
        if pictures is not None and (not isinstance(pictures, int) or pictures < 1 or pictures % (every_n_steps or 1)):
            raise ValueError(
                f"picture_every_n_steps is a whole number from 1 and a multiple of every_n_steps, or None for the last "
                f"step alone; got {pictures!r} with every_n_steps={every_n_steps}"
            )
        self.picture_every_n_steps = picture_every_n_steps
        self.dirpath = dirpath
        self.filename = filename
        self.every_n_steps = every_n_steps
        self.bubble: float | None = None
        """The measured bubble of the last step that was logged."""
        self.recorded: RecordedStep | None = None
        """This rank's recording of the last step, on its own clock."""
        self._last_step = 0
        self._recording = RecordedStep(0)
        self._files: TimelineFiles | None = None
        self._folder: Path | None = None
        self._live: LiveStatus | None = None
        self._has_begun = False
        self._microbatch: Any = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        self._files = self._microbatch = None
        self._has_begun = False
        strategy = pipeline_of(trainer)
        if strategy is not None:
            strategy.observers.add(self._note_action)
            strategy.observe_buckets = self._note_reduction
            self._folder = Path(strategy.broadcast(self.dirpath or trainer.log_dir or trainer.default_root_dir))
            self._live = LiveStatus(self._folder / f"{self.filename}{SUFFIX}", strategy.session)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._recording = RecordedStep(trainer.global_rank)
        if self._live is not None:
            self._live.begin(trainer.global_step, self._recording.actions)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = pipeline_of(trainer)
        if strategy is None:
            return
        self.recorded = self._recording
        if not self._has_begun:  # a copy: a batch that is kept would be sent to all ranks
            self._has_begun = True
            with strategy.session.stages.aside():  # on all ranks, as it may be a meeting
                self._microbatch = first_microbatch(strategy.session, pl_module, batch)
        self.recorded.peak_live = strategy.session.pipeline.peak_live
        # Batches within an accumulation window are no optimizer steps.
        step, is_step = trainer.global_step, trainer.global_step != self._last_step
        self._last_step = step
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if is_step and every and step % every == 0 and self.recorded.actions:
            recorded, metrics = self._exchange(trainer, strategy, pl_module)
            if self.picture_every_n_steps is not None and step % self.picture_every_n_steps == 0:
                with strategy.session.stages.aside():
                    if self._files is not None:
                        self._files.show(recorded, trainer.loggers, step)
            shown = {name: metrics.pop(name) for name in ("pipeline/bubble", "pipeline/slowest_stage")}
            pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)
            pl_module.log_dict(shown, on_step=True, on_epoch=False, batch_size=1, prog_bar=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = pipeline_of(trainer)
        if strategy is None:
            rank_zero_info("PipelineTimeline draws nothing: the Trainer does not use the pipeline strategy")
            return
        strategy.observers.discard(self._note_action)
        strategy.observe_buckets = None
        self._end_live(forget=True)
        if self.recorded is None or not self.recorded.actions:
            return
        recorded, metrics = self._exchange(trainer, strategy, pl_module)
        told = ""
        with strategy.session.stages.aside():
            if self._files is not None:
                paths = self._files.finish(recorded, strategy.session, pl_module)
                self._files.show(recorded, trainer.loggers, trainer.global_step, is_drawn=True)
                log_report(trainer.loggers, paths[0])
                told = ", ".join(map(str, paths))
        rank_zero_info(
            f"Timeline of the last training step (bubble {self.bubble:.1%}, simulated "
            f"{metrics['pipeline/bubble_simulated']:.1%}): {told}"
        )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end_live(forget=False)

    def _end_live(self, *, forget: bool) -> None:
        if self._live is not None:
            self._live.end(forget=forget)
            self._live = None

    def _note_action(self, span: Span) -> None:
        self._recording.actions.append(span)

    def _note_reduction(self, bucket: int, start: float, end: float) -> None:
        self._recording.reductions.append((start, end))

    def _exchange(
        self, trainer: Trainer, strategy: PipelineStrategy, module: LightningModule
    ) -> tuple[list[list[RecordedStep]], dict[str, float]]:
        """All ranks' recordings of the last step, by replica and stage, and the metrics. All ranks must call it."""
        session, own = strategy.session, self.recorded
        assert own is not None
        own.sent, own.memory = sent_bytes(session.pipeline), peak_memory(session.device)
        if (offload := session.pipeline.offload) is not None:
            own.offload, own.live_bytes = offload.share, offload.peak_bytes
            own.kept, own.away = offload.kept, offload.sent
        # All ranks log: metrics that callbacks monitor have to be the same everywhere.
        recorded = gather_recordings(own, session.transport, session.replicas)
        metrics = timeline_metrics(recorded, session.pipeline.placement)
        self.bubble = metrics["pipeline/bubble"]
        with session.stages.aside():
            if session.topology.rank == 0:
                assert self._folder is not None
                if self._files is None:
                    self._files = TimelineFiles(self._folder, self.filename, session, module, self._microbatch)
                self._files.add(trainer.global_step, recorded)
        return recorded, metrics


def timeline_metrics(recorded: Sequence[Sequence[RecordedStep]], placement: Sequence[int]) -> dict[str, float]:
    """The numbers that `PipelineTimeline` logs, by name."""
    pipelines = [[rank.actions for rank in pipeline] for pipeline in recorded]
    timeline = [row for pipeline in pipelines for row in pipeline]
    begin, end = extent(timeline)
    duration = end - begin
    reductions = [rank.reductions for pipeline in recorded for rank in pipeline]
    # Replicas may differ in speed, and in the schedule that "auto" has chosen.
    simulations = [
        measured_costs([actions], placement).simulate(recorded_schedule(actions, placement), pipeline[0].offload)
        for pipeline, actions in zip(recorded, pipelines, strict=True)
    ]
    metrics = {
        "pipeline/bubble": idle_share(timeline),
        "pipeline/bubble_simulated": fmean(simulation.bubble for simulation in simulations),
    }
    if any(rank.offload or rank.kept for pipeline in recorded for rank in pipeline):
        metrics.update(metric for pipeline in recorded for metric in _bytes_of(pipeline, placement))
    metrics["pipeline/slowest_stage"] = float(slowest_stage(timeline))
    if any(reductions):
        metrics["pipeline/reduction_overlap"] = overlapped_share(timeline, reductions)
    for pipeline, simulation in zip(recorded, simulations, strict=True):
        for rank, simulated in zip(pipeline, simulation.peak_live, strict=True):
            metrics[f"pipeline/live_activations/rank{rank.rank}"] = float(rank.peak_live)
            metrics[f"pipeline/live_activations_simulated/rank{rank.rank}"] = float(simulated)
            computing = sum(end - start for action, start, end in rank.actions if action.kind.is_compute)
            metrics[f"pipeline/busy/rank{rank.rank}"] = computing / duration if duration else 0.0
    return metrics


def _bytes_of(pipeline: Sequence[RecordedStep], placement: Sequence[int]) -> Iterator[tuple[str, float]]:
    """The metrics of activations in bytes."""
    schedule = recorded_schedule([rank.actions for rank in pipeline], placement)
    kept = [float(pipeline[place].kept.get(stage, 0)) for stage, place in enumerate(placement)]
    away = [float(pipeline[place].away.get(stage, 0)) for stage, place in enumerate(placement)]
    simulated = peak_bytes(schedule, kept, sent=away)
    for rank, order, most in zip(pipeline, schedule.orders, simulated, strict=True):
        yield f"pipeline/live_bytes/rank{rank.rank}", float(rank.live_bytes)
        yield f"pipeline/live_bytes_simulated/rank{rank.rank}", most
        if rank.offload:
            yield f"pipeline/host_bytes/rank{rank.rank}", sum(away[one.stage] for one in away_in(order))
