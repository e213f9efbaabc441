"""What the ranks recorded, as a Chrome trace, as a picture, and as one number."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipeline.schedules.chrome_trace import save_chrome_trace
from lightning_pipeline.schedules.picture import save_picture
from lightning_pipeline.schedules.timeline import Timeline, extent, idle_share


def measured_bubble(timeline: Timeline) -> float:
    """The share of all ranks' time, from the first action's start to the last one's end, without computation."""
    return idle_share(timeline)


def write_chrome_trace(timeline: Timeline, path: Path) -> Path:
    """Write the actions with their times, which are in seconds. Returns `path`."""
    return save_chrome_trace(timeline, path)


def draw_timeline(timeline: Timeline, path: Path) -> Path | None:
    """Draw the computing actions, one row a rank. Returns `path`, or None where matplotlib is not installed."""
    begin, _ = extent(timeline)
    milliseconds = [
        [(action, (start - begin) * 1e3, (stop - begin) * 1e3) for action, start, stop in row] for row in timeline
    ]
    try:
        return save_picture(milliseconds, path, title="last training step", time_label="milliseconds")
    except ModuleNotFoundError as error:
        rank_zero_warn(f"the timeline is not drawn: {error}")
        return None
