"""`run_pipeline.sh` trains ResNet-50 as two stages, from a rank table or by torchrun, with a log for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launching import PATIENCE_S

from .conftest import ROOT
from .test_cifar10 import write_archive

SCRIPT = ROOT / "examples/run_pipeline.sh"
TABLE = ROOT / "examples/rank_tables/2_devices.json"
# Two images to a micro-batch, and nothing written but the values of one step.
SHORT = [
    "data.image_size=32",
    "data.batch_size=8",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "+trainer.limit_train_batches=1",
    "+trainer.limit_val_batches=0",
    "+trainer.enable_checkpointing=false",
    "+trainer.enable_model_summary=false",
    "+trainer.enable_progress_bar=false",
    "callbacks.checkpoint=null",
    "callbacks.progress=null",
    "callbacks.timeline=null",
]


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "DEVICE", "LOCAL_RANK"))}
    environment = {**kept, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=PATIENCE_S)[0]
    finally:
        process.terminate()  # ends what it has started, too


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_rank_table_trains(tmp_path: Path) -> None:
    # A space in the path, as users have.
    data = tmp_path / "my data"
    data.mkdir()
    md5 = write_archive(data / "cifar-10-binary.tar.gz")
    table = os.path.relpath(TABLE, tmp_path)
    process = start(tmp_path, "my data", "CPU", *SHORT, f"+data.md5={md5}", LOG_DIR="logs/a b", RANK_TABLE_FILE=table)
    output = ended(process)
    folder = tmp_path / "logs/a b"
    logs = {rank: (folder / f"rank_{rank}.log").read_text() for rank in (0, 1)}
    assert process.returncode == 0, output + logs[0] + logs[1]
    assert f"2 of 2 processes from {TABLE}" in output
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in logs[1]
    assert "train/loss" in logs[0] and "train/loss" not in logs[1]
    assert (folder / "train_rank1.log").exists()
    assert (folder / "csv/metrics.csv").read_text() != ""


TORCHRUN = """
#!/usr/bin/env bash
# Stands in for the interpreter: torchrun is real, and what it starts says what it is.
if [ "$2" = torch.distributed.run ]; then exec "$REAL" "$@"; fi
echo "rank $RANK of $WORLD_SIZE: $@"
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_torchrun_starts_the_same(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").touch()
    variables = {"PYTHON": stand_in(tmp_path, TORCHRUN), "REAL": sys.executable, "LOG_DIR": "out", "DEVICE_NUM": "3"}
    process = start(tmp_path, ".", "GPU", "trainer.max_epochs=1", **variables)
    output = ended(process)
    assert process.returncode == 0, output
    assert "3 processes by torchrun" in output
    for rank in range(3):
        log = (tmp_path / f"out/rank_{rank}.log").read_text()
        assert log.startswith(f"rank {rank} of 3: {ROOT}/examples/train.py experiment=resnet50_cifar10 ")
        for argument in ("trainer.accelerator=gpu", "trainer.devices=3", "${oc.env:RANK}", "trainer.max_epochs=1"):
            assert argument in log


def stand_in(folder: Path, program: str) -> str:
    path = folder / "python"
    path.write_text(program.lstrip())
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["."], {}, "Usage: bash"),
        ([".", "TPU"], {}, "the device is Ascend, GPU or CPU, got 'TPU'"),
        (["none", "CPU"], {}, "there is no cifar-10-binary.tar.gz in 'none': DATA_PATH is its folder"),
        ([".", "CPU"], {"RANK_TABLE_FILE": "none.json"}, "cannot read the rank table"),
        (
            [".", "CPU"],
            {"RANK_TABLE_FILE": str(TABLE), "SERVER_ID": "b"},
            "the rank table has no server 'b', it has 10.0.0.1",
        ),
    ],
)
def test_what_cannot_run_is_told_before_it_starts(
    arguments: list[str], variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    if arguments[0] == ".":
        (tmp_path / "cifar-10-binary.tar.gz").touch()
    process = start(tmp_path, *arguments, **variables)
    assert words in ended(process)
    assert process.returncode == 2
    assert not list(tmp_path.glob("logs/**/rank_*.log"))


PROGRAM = """
#!/usr/bin/env bash
# Stands in for the interpreter: rank $FAILS fails, the others wait.
if [ "$2" = lightning_pipeline ]; then exec "$REAL" "$@"; fi
[ "$RANK_ID" = "$FAILS" ] && { until [ -s 0.pid ]; do sleep 0.02; done; echo "rank 1 is lost"; exit 7; }
echo $$ > "$RANK_ID.pid"
exec sleep 60
"""


def start_two(folder: Path, fails: str) -> subprocess.Popen[str]:
    (folder / "cifar-10-binary.tar.gz").touch()
    variables = {"PYTHON": stand_in(folder, PROGRAM), "REAL": sys.executable, "FAILS": fails}
    return start(folder, ".", "CPU", **variables, RANK_TABLE_FILE=str(TABLE), LOG_DIR="out")


def test_a_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    process = start_two(tmp_path, fails="1")
    output = ended(process)
    assert process.returncode == 7
    assert "a process failed with exit code 7" in output
    assert "rank 1 is lost" in output
    assert not psutil.pid_exists(int((tmp_path / "0.pid").read_text()))


def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    process = start_two(tmp_path, fails="none")
    notes, deadline = [tmp_path / "0.pid", tmp_path / "1.pid"], time.monotonic() + PATIENCE_S
    while not all(note.exists() and note.read_text() for note in notes):
        assert time.monotonic() < deadline, ended(process)
        time.sleep(0.05)
    process.terminate()
    ended(process)
    assert process.returncode == 130
    assert not any(psutil.pid_exists(int(note.read_text())) for note in notes)
