"""The benchmark runs on tiny sizes, and all contenders do the same work in it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import PATIENCE_S, launch

from .conftest import ROOT

SIZES = ["--width", "8", "--num-blocks", "4", "--length", "4", "--num-linear-microbatches", "4"]
ROUNDS = ["--num-rounds", "1", "--num-steps", "2"]


def run_benchmark(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "examples/benchmark/run.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_contenders_train_alike(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = run_benchmark(*SIZES, *ROUNDS, "--schedules", "interleaved_1f1b", "--json", str(output), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ours / torch" in done.stdout

    results = json.loads(output.read_text())
    for workload in ("gpt", "linear"):
        assert set(results[workload]) == {"one process", "torch interleaved_1f1b", "ours interleaved_1f1b"}
        for measured in results[workload].values():
            assert len(measured["seconds"]) == 2
            assert min(measured["seconds"]) > 0
        ours, torchs = (results[workload][f"{who} interleaved_1f1b"]["loss"] for who in ("ours", "torch"))
        assert ours == pytest.approx(torchs, rel=1e-5)
    assert ours != 0
    assert results["gpt"]["ours interleaved_1f1b"]["loss"] == pytest.approx(
        results["gpt"]["one process"]["loss"], rel=1e-5
    )
    # Two ranks with two stages each and 8 micro-batches: 16 passes of a rank and a bubble of one.
    assert results["ideal_share"]["interleaved_1f1b"] == pytest.approx(17 / 16 / 2)
    assert not results["left_out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedules", "zbv", "--num-blocks", "3"], "--num-blocks 3 is less than the 4 stages of zbv"),
        (["--num-microbatches", "1"], "num_microbatches must be at least"),
        (["--schedules", "2f2b"], "invalid choice: '2f2b'"),
    ],
)
def test_settings_that_cannot_run_are_told_at_once(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run_benchmark(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


WORKLOADS = {"waiting": 0.1, "gpt": 0.0}  # milliseconds that a layer waits


def work_on_overlap(settings: dict[str, Any], folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples/benchmark"))
    import overlap_worker

    for name, layer_ms in WORKLOADS.items():
        overlap_worker.main("1f1b", {**settings, "layer_ms": layer_ms}, folder / name)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_gradients_overlap_in_every_other_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples/benchmark")
    import overlap

    settings = {"num_stages": 2, "num_replicas": 2, "num_microbatches": 2, "num_layers": 4, "width": 8, "num_steps": 2}
    launch(work_on_overlap, settings, tmp_path, world=4)
    for name in WORKLOADS:
        ranks = [json.loads((tmp_path / name / f"1f1b-{rank}.json").read_text()) for rank in range(4)]
        for steps in ranks:
            assert [step["overlaps"] for step in steps] == [False, True, False, True]
            # Otherwise every all-reduce starts when the last backward is over.
            assert [step["share"] > 0 for step in steps] == [False, True, False, True]
        with_overlap, without, share = overlap.summary(ranks)
        assert min(with_overlap, without) > 0
        assert 0 < share <= 1


def grow(*arguments: str, folder: Path) -> dict[str, Any]:
    """The figures of growth.py."""
    command = [sys.executable, str(ROOT / "examples/benchmark/growth.py"), "--output", str(folder), *arguments]
    subprocess.run([*command, "--num-rounds", "1", "--num-steps", "2"], check=True, timeout=PATIENCE_S)
    assert (folder / "growth.png").stat().st_size > 1000
    return json.loads((folder / "growth.json").read_text())


def test_growth_of_schedules(tmp_path: Path) -> None:
    results = grow("--sweeps", "schedules", "--largest", "128", folder=tmp_path / "made")
    assert results["schedules"]["sizes"] == [64, 128]
    assert all(seconds > 0 for seconds in results["schedules"]["costs"]["ours 1f1b"])


@pytest.mark.multiprocess
@pytest.mark.slow
def test_growth_of_steps(tmp_path: Path) -> None:
    results = grow("--largest", "8", folder=tmp_path)
    for name, peer in (
        ("micro-batches", "torch 1f1b"),
        ("one stage", "lightning"),
        ("ranks", "torch 1f1b"),
        ("replicas", "torch 1f1b"),
        ("start", "ddp"),
    ):
        costs = results[name]["costs"]
        assert set(costs) == {peer, "ours 1f1b"}
        assert all(len(found) == len(results[name]["sizes"]) and min(found) > 0 for found in costs.values())
