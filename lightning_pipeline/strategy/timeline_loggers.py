"""Pictures and reports of `PipelineTimeline` in the Trainer's loggers, as far as each can take them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PICTURE = "pipeline/timeline"


def log_picture(loggers: Iterable[Any], picture: Path, step: int) -> None:
    """Give a picture to TensorBoard (`add_image`), W&B, MLflow and Comet (`log_image`); other loggers get none."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(logger, "log_image"):  # Lightning's logger of W&B, or one of the user's that does the same
            logger.log_image(_PICTURE, [str(picture)], step=step)
        elif hasattr(experiment, "add_image"):
            from matplotlib.image import imread

            experiment.add_image(_PICTURE, imread(picture)[..., :3], step, dataformats="HWC")
        elif hasattr(logger, "run_id") and hasattr(experiment, "log_artifact"):  # MLflow's client
            experiment.log_artifact(logger.run_id, str(picture), f"{_PICTURE}/step-{step}")
        elif hasattr(experiment, "log_image"):  # Comet's experiment
            experiment.log_image(str(picture), name=_PICTURE, step=step)


def log_report(loggers: Iterable[Any], report: Path) -> None:
    """Give the report to W&B, MLflow and Comet as an artifact; TensorBoard has no place for one."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(logger, "run_id") and hasattr(experiment, "log_artifact"):
            experiment.log_artifact(logger.run_id, str(report), "pipeline")
        elif hasattr(experiment, "log_asset"):
            experiment.log_asset(str(report), file_name="pipeline/report.html")
        elif hasattr(experiment, "log_artifact"):
            experiment.log_artifact(str(report), name=f"pipeline-report-{experiment.id}", type="report")
