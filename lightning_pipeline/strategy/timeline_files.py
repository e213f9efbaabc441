"""What the ranks recorded, as a Chrome trace and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipeline.runtime.recording import Recording
from lightning_pipeline.schedules.chrome_trace import save_chrome_trace
from lightning_pipeline.schedules.picture import save_picture

MAX_ROWS = 32
"""Ranks in a picture: as many replicas as that allows, and at least one."""


def write_chrome_trace(recorded: Sequence[Sequence[Recording]], path: Path) -> Path:
    """Write what all ranks did, with times in seconds, by replica and stage. Returns `path`."""
    ranks = [rank for pipeline in recorded for rank in pipeline]
    return save_chrome_trace(
        [rank.actions for rank in ranks],
        path,
        reductions=[rank.reductions for rank in ranks],
        labels=_labels(recorded),
    )


def draw_timeline(recorded: Sequence[Sequence[Recording]], path: Path) -> Path | None:
    """Draw what the ranks of the first replicas did. Returns `path`, or None where matplotlib is not installed."""
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


def _labels(recorded: Sequence[Sequence[Recording]]) -> list[str]:
    """The ranks' names, replica after replica."""
    if len(recorded) == 1:
        return [f"rank {rank.rank}" for rank in recorded[0]]
    return [
        f"rank {rank.rank} (replica {replica}, {_stages(rank)})"
        for replica, pipeline in enumerate(recorded)
        for rank in pipeline
    ]


def _stages(rank: Recording) -> str:
    """``"stage 1"``, or ``"stages 1, 3"`` where a rank holds several virtual ones."""
    stages = sorted({action.stage for action, _, _ in rank.actions})
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
