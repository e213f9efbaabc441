"""LightningCLI: the strategy by name and by class, from the command line and from a file that it has printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from tests.scripts import Host

pytestmark = pytest.mark.multiprocess

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
SCRIPT = Path(__file__).with_name("cli_script.py")
TIMEOUT_S = 120.0
OPTIONS = {"accelerator": "cpu", "devices": 2, "max_epochs": 1}
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET = [f"--trainer.{name}={value}" for name, value in {**OPTIONS, **dict.fromkeys(OFF, "false")}.items()]


def run(folder: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "fit", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def run_on_host(folder: Path, *arguments: str, **variables: str) -> str:
    """The same in processes that have imported Lightning, and so this package, before."""
    with closing(Host(SCRIPT, TIMEOUT_S)) as host:
        process = host.start([], ["fit", *arguments], cwd=folder, **variables)
        try:
            output = process.communicate(timeout=TIMEOUT_S)[0]
        finally:
            process.kill()
    assert process.returncode == 0, output[-3000:]
    return output


@pytest.mark.slow
def test_by_class_with_options_and_from_the_file_it_prints(tmp_path: Path) -> None:
    chosen = "--trainer.strategy=lightning_pipeline.PipelineStrategy"
    options = ["--trainer.strategy.stage_config=layers.2:1", "--trainer.strategy.num_microbatches=4"]
    printed = run(tmp_path, *QUIET, chosen, *options, "--print_config")
    strategy = yaml.safe_load(printed)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_pipeline.PipelineStrategy"
    assert strategy["init_args"]["stage_config"] == "layers.2:1"
    assert strategy["init_args"]["num_microbatches"] == 4
    file = tmp_path / "fit.yaml"
    file.write_text(printed)
    told = run(tmp_path, "--config", str(file))
    assert "Pipeline: 2 stages, 1 replica; a replica's batch of 8 samples is 4 micro-batches of 2" in told
    for rank in range(2):
        assert f"rank {rank}: 2 steps of PipelineStrategy" in told


@pytest.mark.parametrize(
    "start", [pytest.param(run_on_host, id="forked"), pytest.param(run, id="interpreted", marks=pytest.mark.slow)]
)
def test_by_name_with_options_from_the_environment(start: Callable[..., str], tmp_path: Path) -> None:
    variables = {
        "LIGHTNING_PIPELINE_STAGE_CONFIG": "layers.2:1",
        "LIGHTNING_PIPELINE_NUM_MICROBATCHES": "2",
    }
    told = start(tmp_path, *QUIET, "--trainer.strategy=pipeline", **variables)
    assert "Pipeline: 2 stages, 1 replica; a replica's batch of 8 samples is 2 micro-batches of 4" in told
