"""The files that `PipelineTimeline` writes on the first rank: records as the run goes, then a picture and a report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_pipeline.partition.batches import microbatches_of
from lightning_pipeline.planning.rebalance import rebalance
from lightning_pipeline.schedules import ScheduleError, measured_costs, recorded_schedule, save_chrome_trace
from lightning_pipeline.schedules.records import Pipelines, RecordFile, read_records
from lightning_pipeline.schedules.report import labels_of, report_of_records
from lightning_pipeline.schedules.timeline import Timeline, save_picture

from .._lightning import LightningModule, rank_zero_warn
from .measure import Described, bytes_with_state, described, estimate_training_step, restored, without_side_effects
from .session import Session
from .stage_optimizers import inner
from .timeline_loggers import log_picture

MAX_ROWS = 32
"""Ranks in a picture: as many replicas as that allows, and at least one."""
REPORT = "report.html"
RECORDS = ".jsonl"


class TimelineFiles:
    """What the first rank writes of a run.

    Args:
        filename: of the records, the picture and the trace, without ending.
        microbatch: one of the run's, to estimate the step with; None if there is none.
    """

    def __init__(
        self, folder: Path, filename: str, session: Session, module: LightningModule, microbatch: Described | None
    ) -> None:
        self.folder = folder
        self._filename = filename
        stages = session.pipeline.recorder.calls.stages
        firsts = {stage: name for name, stage in reversed(list(stages.exact.items()))}
        placement = session.pipeline.placement
        self._records = RecordFile(
            folder / f"{filename}{RECORDS}",
            {
                "module": type(module).__name__,
                "schedule": session.strategy.schedule_choice.label,
                "num_microbatches": session.pipeline.num_microbatches,
                "stages": [{"rank": rank, "first": firsts.get(stage, "")} for stage, rank in enumerate(placement)],
                "stage_config": stages.as_config(),
            },
        )
        self._microbatch = microbatch
        self._last_step = -1

    def add(self, step: int, recorded: Pipelines) -> None:
        """Append a step to the records, unless it is there already."""
        if step == self._last_step:
            return
        self._last_step = step
        self._records.add_step(step, time.time(), recorded)

    def show(self, recorded: Pipelines, loggers: Sequence[Any], step: int, *, is_drawn: bool = False) -> None:
        """Give the loggers the picture. It is the file's if that `is_drawn`; else it is drawn anew."""
        picture = self.folder / f"{self._filename}.png"
        if loggers and (is_drawn or draw_timeline(recorded, picture, f"step {step}") is not None) and picture.is_file():
            log_picture(loggers, picture, step)

    def finish(self, recorded: Pipelines, session: Session, module: LightningModule) -> list[Path]:
        """Write the rest. Returns the paths: report, picture if there is one, trace."""
        advice = self._advice([rank.actions for rank in recorded[0]], session, module)
        self._records.add_advice(advice)
        report = report_of_records(read_records(self._records.path)).save(self.folder / REPORT)
        picture = draw_timeline(recorded, self.folder / f"{self._filename}.png")
        kept = {number: stage["kept_bytes"] for number, stage in enumerate(advice.get("stages", ()))}
        trace = write_chrome_trace(recorded, self.folder / f"{self._filename}.json", kept)
        return [report, *([picture] if picture is not None else []), trace]

    def _advice(self, timeline: Timeline, session: Session, module: LightningModule) -> dict[str, Any]:
        """What is estimated of the stages, and what moving modules would gain, for the report."""
        if len(session.pipeline.placement) == 1:
            return {}
        try:
            return self._estimated(timeline, session, module)
        except Exception as error:  # the user's step may need what is not there; the run has been successful
            return {"notes": [f"What moving modules would gain is not known ({type(error).__name__}: {error})."]}

    def _estimated(self, timeline: Timeline, session: Session, module: LightningModule) -> dict[str, Any]:
        if self._microbatch is None:
            raise ValueError("the batch has no micro-batch to estimate the step with")
        pipeline, device = session.pipeline, session.device
        microbatch = restored(self._microbatch, device)[0]
        with without_side_effects(module, device):
            costs = estimate_training_step(module, microbatch, device)
        placement = pipeline.placement
        found = rebalance(
            costs,
            pipeline.recorder.calls.stages.exact,
            measured_costs([timeline], placement),
            recorded_schedule(timeline, placement),
            bytes_with_state(module, list(map(inner, session.strategy.optimizers))),
        )
        return {
            "stages": [asdict(stage) for stage in found.now.stages],
            "moves": [asdict(move) for move in found.alone],
            "better": f"{str(found)[:1].upper()}{str(found)[1:]}.",
        }


def first_microbatch(session: Session, module: LightningModule, batch: Any) -> Described | None:
    """A copy of a batch's first micro-batch, on the CPU; None if there is one stage, or the batch has no parts."""
    if len(session.pipeline.placement) == 1 or session.topology.rank != 0:
        return None
    try:
        return described({0: microbatches_of(batch, session.pipeline.num_microbatches, module)[0]})
    except Exception:  # such as of a batch that is an iterator; the report says that it is missing
        return None


def write_chrome_trace(recorded: Pipelines, path: Path, kept: Mapping[int, float] | None = None) -> Path:
    """Write a trace of all ranks' recordings. Returns `path`. `kept`: bytes that each virtual stage keeps."""
    ranks = [rank for pipeline in recorded for rank in pipeline]
    return save_chrome_trace(
        [rank.actions for rank in ranks],
        path,
        reductions=[rank.reductions for rank in ranks],
        labels=labels_of(recorded),
        kept=kept,
        offload=ranks[0].offload,
    )


def draw_timeline(recorded: Pipelines, path: Path, title: str = "last training step") -> Path | None:
    """Draw the recordings of the first replicas. Returns `path`, or None where matplotlib is not installed."""
    num_shown = max(1, MAX_ROWS // len(recorded[0]))
    shown: Sequence[Any] = [rank for pipeline in recorded[:num_shown] for rank in pipeline]
    if num_shown < len(recorded):
        title += f", {num_shown} of {len(recorded)} replicas"
    try:
        return save_picture(
            [[(action, start * 1e3, end * 1e3) for action, start, end in rank.actions] for rank in shown],
            path,
            title=title,
            time_label="milliseconds",
            reductions=[[(start * 1e3, end * 1e3) for start, end in rank.reductions] for rank in shown],
            labels=labels_of(recorded)[: len(shown)],
        )
    except (ModuleNotFoundError, ScheduleError) as error:
        rank_zero_warn(f"the timeline is not drawn: {error}")
        return None
