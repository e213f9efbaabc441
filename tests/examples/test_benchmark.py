"""The benchmark runs on tiny sizes, and all contenders do the same work in it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

SIZES = ["--width", "8", "--num-blocks", "2", "--length", "4", "--num-linear-microbatches", "4"]
ROUNDS = ["--num-rounds", "2", "--num-steps", "2"]


@pytest.mark.multiprocess
def test_the_contenders_train_alike(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "examples/benchmark/run.py"), *SIZES, *ROUNDS, "--json", str(output)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "median / ideal" in done.stdout

    results = json.loads(output.read_text())
    names = {"one process", "torch 1f1b", "ours 1f1b", "torch gpipe", "ours gpipe"}
    for workload in ("gpt", "linear"):
        assert set(results[workload]) == names
        alone = results[workload]["one process"]["loss"]
        for measured in results[workload].values():
            assert measured["loss"] == pytest.approx(alone, rel=1e-5)
            assert len(measured["seconds"]) == 2 * 2
            assert min(measured["seconds"]) > 0
