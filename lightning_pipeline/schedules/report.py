"""The report of a run, a schedule or a plan: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_pipeline.schedules.recorded_costs import measured_costs, recorded_schedule
from lightning_pipeline.schedules.records import Pipelines, RecordedStep, Records
from lightning_pipeline.schedules.schedule import Kind
from lightning_pipeline.schedules.simulation import Simulation
from lightning_pipeline.schedules.timeline import Timeline, extent, idle_share, replicas_of
from lightning_pipeline.schedules.validation import ScheduleError
from lightning_pipeline.schedules.waits import live_over_time, shares, waits

MAX_ROWS = 64
"""Ranks that a report shows, of whole replicas as long as there are fewer in one."""
MAX_ACTIONS = 200_000
"""Actions that a report holds; of more, fewer steps are shown."""
_TEMPLATE = Path(__file__).with_name("report.html")


@dataclass
class Report:
    """What a report says; times are in the unit of `unit`.

    Attributes:
        unit: ``"ms"``, or what times are counted in.
        steps: of each step: what `_step` gives.
        stages: for each virtual stage what is known of it: rank, first, last, forward, backward (seconds),
            parameter_bytes, kept_bytes.
        moves: for each module that could be moved alone: module, stages before and after, seconds of a step then.
        better: a sentence on the best cut that was found.
    """

    title: str
    unit: str
    labels: list[str]
    steps: list[dict[str, Any]]
    stages: list[Mapping[str, Any]] = field(default_factory=list)
    moves: list[Mapping[str, Any]] = field(default_factory=list)
    better: str = ""
    stage_config: Mapping[str, int | str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write it. Returns the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Within a script element, text ends at the first "</".
        content = json.dumps(vars(self), separators=(",", ":"), default=str).replace("<", "\\u003c")
        page = _TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/", content)
        path.write_text(page, encoding="utf-8")
        return path


def report_of_records(records: Records) -> Report:
    """The report of a recorded run.

    Raises:
        ScheduleError: what is recorded of the run as a whole does not fit its steps.
    """
    steps = records.steps
    per_step = sum(len(rank.actions) for pipeline in steps[-1][2] for rank in pipeline) or 1
    most = max(1, MAX_ACTIONS // per_step)
    steps = steps[:: -(-len(steps) // most)] if len(steps) > most else steps
    num_shown = max(1, MAX_ROWS // max(1, len(steps[-1][2][0])))
    num_replicas = len(steps[-1][2])
    notes = []
    if len(steps) < records.num_steps:
        notes.append(f"{len(steps)} of {records.num_steps} recorded steps are shown.")
    if num_shown < num_replicas:
        notes.append(f"{num_shown} of {num_replicas} replicas are shown.")
    try:
        advice = records.advice
        stages = list(advice.get("stages") or records.run["stages"])
        kept = {n: float(stage["kept_bytes"]) for n, stage in enumerate(stages) if stage.get("kept_bytes")}
        report = Report(
            f"{records.run['module']}, schedule {records.run['schedule']}",
            "ms",
            labels_of(steps[-1][2][:num_shown]),
            [_step(f"step {number}", pipelines[:num_shown], kept) for number, _, pipelines in steps],
            stages,
            list(advice.get("moves", ())),
            str(advice.get("better", "")),
            dict(records.run["stage_config"]),
            notes + [str(note) for note in advice.get("notes", ())],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(f"this is no record of a run ({type(error).__name__}: {error})") from None
    return report


def report_of_trace(timeline: Timeline, title: str) -> Report:
    """The report of the one step that a Chrome trace has."""
    pipelines = [[RecordedStep(rank, list(timeline[rank])) for rank in rows] for rows in replicas_of(timeline)]
    shown = pipelines[: max(1, MAX_ROWS // len(pipelines[0]))]
    is_measured = any(action.kind is Kind.SEND_F for row in timeline for action, _, _ in row)
    step = _step("last step", shown, {}, is_simulated=not is_measured and len(pipelines[0]) > 1)
    return Report(title, "ms", labels_of(shown), [step])


def report_of_simulation(
    simulation: Simulation,
    title: str,
    *,
    unit: str = "units of time",
    scale: float = 1.0,
    stages: Sequence[Mapping[str, Any]] = (),
    stage_config: Mapping[str, int | str] | None = None,
    offload: float = 0,
) -> Report:
    """The report of a schedule, or of a plan.

    Args:
        unit: of the times in the report.
        scale: of these in one unit of the simulation's times.

    Raises:
        ScheduleError: there are more ranks than a report has room for.
    """
    if len(simulation.spans) > 4 * MAX_ROWS:
        raise ScheduleError(
            f"a report has room for {4 * MAX_ROWS} ranks, got {len(simulation.spans)}; write a trace (.json) instead"
        )
    kept = {number: float(stage.get("kept_bytes") or 0) for number, stage in enumerate(stages)}
    ranks = [RecordedStep(rank, list(row), offload=offload) for rank, row in enumerate(simulation.spans)]
    step = _step("", [ranks], kept, scale=scale, is_simulated=True)
    return Report(title, unit, labels_of([ranks]), [step], list(stages), stage_config=stage_config or {})


def labels_of(pipelines: Pipelines) -> list[str]:
    """The names of the rows."""
    if len(pipelines) == 1:
        return [f"rank {rank.rank}" for rank in pipelines[0]]
    return [
        f"rank {rank.rank} (replica {replica}, {_stages(rank)})"
        for replica, pipeline in enumerate(pipelines)
        for rank in pipeline
    ]


def placement_of_timeline(timeline: Timeline) -> list[int]:
    """The rank of each virtual stage, by where it computes."""
    rank_of = {action.stage: rank for rank, row in enumerate(timeline) for action, _, _ in row}
    return [rank_of.get(stage, 0) for stage in range(1 + max(rank_of))]


def _step(
    label: str,
    pipelines: Pipelines,
    kept: Mapping[int, float],
    *,
    scale: float = 1e3,
    is_simulated: bool = False,
) -> dict[str, Any]:
    """A step as the page takes it: times from its first start, in the report's unit."""
    begin, end = extent([rank.actions for pipeline in pipelines for rank in pipeline])
    end = max([end, *(stop for pipeline in pipelines for rank in pipeline for _, stop in rank.reductions)])

    def at(time: float) -> float:
        return round((time - begin) * scale, 5)

    rows: list[dict[str, Any]] = []
    simulated: list[dict[str, Any]] = []
    bubbles: list[float] = []
    for pipeline in pipelines:
        timeline = [rank.actions for rank in pipeline]
        offload = pipeline[0].offload
        transfer = math.inf  # in a simulation, nothing but a transfer comes between a result and its user
        if not is_simulated:
            placement = placement_of_timeline(timeline)
            costs = measured_costs([timeline], placement)
            transfer = costs.transfer
            simulation = costs.simulate(recorded_schedule(timeline, placement))
            bubbles.append(simulation.bubble)
            simulated += _rows(simulation.spans, kept, math.inf, lambda time: round(time * scale, 5), (), offload)
        reductions = [rank.reductions for rank in pipeline]
        measured = _rows(timeline, kept, transfer, at, reductions if any(reductions) else (), offload)
        for row, rank in zip(measured, pipeline, strict=True):
            spans = [[at(start), at(stop)] for start, stop in rank.reductions]
            sent = {str(action): size for action, size in rank.sent.items()}
            rows.append(row | {"reductions": spans, "sent": sent, "memory": rank.memory})
    return {
        "label": label,
        "length": at(end),
        "bubble": idle_share([rank.actions for pipeline in pipelines for rank in pipeline]),
        "is_simulated": is_simulated,
        "simulated_bubble": sum(bubbles) / len(bubbles) if bubbles else None,
        "rows": rows,
        "simulated": simulated,
    }


def _rows(
    timeline: Timeline,
    kept: Mapping[int, float],
    transfer: float,
    at: Any,
    reductions: Sequence[Sequence[tuple[float, float]]] = (),
    offload: float = 0,
) -> list[dict[str, Any]]:
    begin, end = extent(timeline)
    found = []
    lives = live_over_time(timeline, kept, offload)
    for row, own, live in zip(timeline, waits(timeline, reductions, transfer), lives, strict=True):
        found.append(
            {
                "actions": [[str(action), at(start), at(stop)] for action, start, stop in row],
                "waits": [
                    [wait.cause.value, at(wait.start), at(wait.end), str(wait.on or ""), str(wait.before or "")]
                    for wait in own
                ],
                "shares": {cause: round(share, 5) for cause, share in shares(own, end - begin).items()},
                "live": [[at(time), count, round(size)] for time, count, size in live],
            }
        )
    return found


def _stages(rank: RecordedStep) -> str:
    """``"stage 1"``, or ``"stages 1, 3"`` of a rank with several virtual stages."""
    stages = sorted({action.stage for action, _, _ in rank.actions})
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
