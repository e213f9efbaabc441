"""A script runs under Lightning's own launcher and under torchrun, and what it cannot do ends it on every rank."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.launching import PATIENCE_S, SOON_S
from tests.scripts import Host

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("script.py")
LIGHTNING: tuple[str, ...] = ()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def ended(process: subprocess.Popen[str], folder: Path) -> str:
    """Its output, once it and the process of the other rank are gone."""
    try:
        output = process.communicate(timeout=PATIENCE_S)[0]
    finally:
        process.kill()
    running = {int(file.read_text()) for file in folder.glob("*.pid")}
    assert len(running) == 2
    deadline = time.monotonic() + SOON_S
    while running and time.monotonic() < deadline:
        running = {pid for pid in running if psutil.pid_exists(pid)}
        time.sleep(0.05)
    assert not running, f"still running: {running}"
    return output


@pytest.mark.slow
def test_lightnings_launcher_and_torchrun_run_a_script(tmp_path: Path) -> None:
    processes = {}
    with closing(Host(SCRIPT, PATIENCE_S)) as host:
        for name, launcher in (("lightning", LIGHTNING), ("torchrun", TORCHRUN)):
            (tmp_path / name).mkdir()
            processes[name] = host.start(launcher, [str(tmp_path / name), "Split"])
        outputs = {name: ended(process, tmp_path / name) for name, process in processes.items()}
    results = {}
    for name, process in processes.items():
        assert process.returncode == 0, outputs[name]
        results[name] = [json.loads((tmp_path / name / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert results["lightning"] == results["torchrun"]
    first, second = results["lightning"]
    assert (first["stage"], second["stage"]) == (0, 1)
    assert first["loss"] == second["loss"] > 0


def test_a_refusal_ends_both_processes_of_a_script(tmp_path: Path) -> None:
    with closing(Host(SCRIPT, PATIENCE_S)) as host:
        process = host.start(LIGHTNING, [str(tmp_path), "Misnamed"])
        output = ended(process, tmp_path)
    assert process.returncode != 0
    assert output.count("stage_config names 'tail', and the module has no submodule of that name") == 2
    assert not list(tmp_path.glob("*.json"))
