"""The default example as a user runs it: two processes, one folder a run, the same results under both schedules."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import PATIENCE_S

from .conftest import ROOT


def trained_values(path: Path) -> list[dict[str, str]]:
    """Each row of a log, without what the timeline measured."""
    with path.open(newline="") as file:
        rows = [{name: row[name] for name in row if not name.startswith("pipeline/")} for row in csv.DictReader(file)]
    return [row for row in rows if any(value for name, value in row.items() if name not in ("step", "epoch"))]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_sweep_over_schedules(tmp_path: Path) -> None:
    short = ["trainer.max_epochs=1", "+trainer.limit_train_batches=10", "+trainer.limit_val_batches=2"]
    overrides = ["trainer.strategy.schedule=gpipe,1f1b", "hydra.sweep.dir=sweep", *short]
    command = [sys.executable, str(ROOT / "examples/train.py"), "-m", *overrides]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("val/acc  ") == 2  # rank 0 reports, once a job
    assert done.stdout.count("trained      LitClassifier, 10 steps on 2 stages") == 2
    times = (
        r"a step +[\d.]+ ms on 2 stages; in one process [\d.]+ ms with the same 8 micro-batches \([\d.]+ times that\), "
        r"[\d.]+ ms with the batch as one \([\d.]+\)"
    )
    assert len(re.findall(times, done.stdout)) == 2

    runs = [tmp_path / "sweep/0", tmp_path / "sweep/1"]
    for run in runs:
        assert (run / "checkpoints/last.ckpt").exists()
        assert f"report       {run / 'report.html'}" in done.stdout and (run / "report.html").is_file()
        assert list(run.glob("*.png")) and list(run.glob("*.json"))
        assert len(list(run.glob("**/.hydra"))) == 1
    assert not (tmp_path / "logs").exists()
    gpipe, one_f_one_b = (trained_values(run / "csv/metrics.csv") for run in runs)
    assert any("val/acc" in row for row in gpipe)
    assert gpipe == one_f_one_b
