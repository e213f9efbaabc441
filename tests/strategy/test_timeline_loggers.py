"""The picture and the report in loggers: TensorBoard's own, and stand-ins with the calls of W&B, MLflow and Comet."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_pipeline import PipelineTimeline
from lightning_pipeline.strategy.timeline_loggers import log_picture, log_report
from tests.browser import window
from tests.launching import SOON_S, launch
from tests.training.models import LitTokens, gpt_stages, token_loader
from tests.training.runs import pipeline_trainer

PICTURE, REPORT = Path("folder/timeline.png"), Path("folder/report.html")


def train(folder: str) -> None:
    trainer = pipeline_trainer(
        gpt_stages(2),
        world=2,
        strategy={"num_microbatches": 2},
        callbacks=[PipelineTimeline(folder, every_n_steps=1, picture_every_n_steps=2)],
        logger=[TensorBoardLogger(folder, name="", version="board"), CSVLogger(folder, name="", version="csv")],
        max_epochs=1,
        log_every_n_steps=1,
    )
    trainer.fit(LitTokens(), token_loader(24, 8))


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    launch(train, str(folder), world=2)
    return folder


@pytest.mark.multiprocess
def test_tensorboard_has_pictures_and_scalars(trained: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(trained / "board"), size_guidance={"images": 0})
    events.Reload()
    # Every second step, and the last one when training ends.
    assert [image.step for image in events.Images("pipeline/timeline")] == [2, 3]
    assert all(image.width > 900 for image in events.Images("pipeline/timeline"))
    names = {f"pipeline/{name}" for name in ("bubble", "busy/rank0", "busy/rank1", "live_activations/rank1")}
    assert names <= set(events.Tags()["scalars"])
    with (trained / "csv" / "metrics.csv").open() as file:  # a logger without pictures has the numbers
        assert "pipeline/busy/rank1" in next(csv.reader(file))


@contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows these logs."""
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", "0", "--host", "127.0.0.1"]
    with subprocess.Popen([*command, "--load_fast=false"], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = (re.search(r"at (http://\S+)", line) for line in server.stderr)
            yield next(match[1] for match in found if match)
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_tensorboards_own_page_shows_them(trained: Path) -> None:
    with window() as page, tensorboard(trained / "board") as address:
        page.set_default_timeout(1000 * SOON_S)
        page.goto(f"{address}#images")
        page.get_by_text("pipeline/timeline", exact=True).wait_for()
        picture = page.locator("img[src*=individualImage]").first
        picture.wait_for()
        page.wait_for_function("picture => picture.naturalWidth > 900", arg=picture.element_handle())

        page.goto(f"{address}#scalars&tagFilter=pipeline/(bubble%7Cbusy)")
        for name in ("bubble", "bubble_simulated", "busy/rank0", "busy/rank1"):
            page.get_by_text(f"pipeline/{name}", exact=True).first.wait_for()
            page.locator(f"tf-scalar-card:has-text('pipeline/{name}') path.line").first.wait_for(state="attached")


class MLflowClient:
    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None: ...


class CometExperiment:
    def log_image(self, image_data: Any, name: str | None = None, step: int | None = None) -> None: ...
    def log_asset(self, file_data: Any, file_name: str | None = None) -> None: ...


class WandbRun:
    id = "r1"

    def log_artifact(self, artifact_or_path: Any, name: str | None = None, type: str | None = None) -> None: ...


def test_mlflow_takes_both_as_artifacts() -> None:
    class Logger:
        run_id = "17"
        experiment = create_autospec(MLflowClient, instance=True)

    log_picture([Logger()], PICTURE, 5)
    log_report([Logger()], REPORT)
    calls = [tuple(call.args) for call in Logger.experiment.log_artifact.call_args_list]
    assert calls == [("17", str(PICTURE), "pipeline/timeline/step-5"), ("17", str(REPORT), "pipeline")]


def test_comet_takes_an_image_and_an_asset() -> None:
    class Logger:
        experiment = create_autospec(CometExperiment, instance=True)

    log_picture([Logger()], PICTURE, 5)
    log_report([Logger()], REPORT)
    Logger.experiment.log_image.assert_called_once_with(str(PICTURE), name="pipeline/timeline", step=5)
    Logger.experiment.log_asset.assert_called_once_with(str(REPORT), file_name="pipeline/report.html")


def test_wandb_takes_an_image_and_an_artifact() -> None:
    logger = create_autospec(WandbLogger, instance=True)
    logger.experiment = create_autospec(WandbRun, instance=True)
    logger.experiment.id = "r1"
    log_picture([logger], PICTURE, 5)
    log_report([logger], REPORT)
    logger.log_image.assert_called_once_with("pipeline/timeline", [str(PICTURE)], step=5)
    logger.experiment.log_artifact.assert_called_once_with(str(REPORT), name="pipeline-report-r1", type="report")


@pytest.mark.parametrize(("every", "pictures"), [(2, 3), (None, 0), (5, 2.5)])
def test_pictures_are_of_steps_that_are_logged(every: int | None, pictures: Any) -> None:
    with pytest.raises(ValueError, match="multiple of every_n_steps"):
        PipelineTimeline(every_n_steps=every, picture_every_n_steps=pictures)
