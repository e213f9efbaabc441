"""A script that trains in a test function runs as MindSpore's tutorials start it, and under Lightning's launcher.

The tutorials' loop makes a folder for each device, copies the script there, exports DEVICE_ID, and runs
`pytest -s -v ./script.py` in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_pipeline.accelerators.rank_table_formats import format_rank_table
from tests.accelerators.tables import make_table, write
from tests.scripts import Host

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("device_script.py")
CONSOLE = Path(__file__).with_name("pytest_console.py")
REPOSITORY = Path(__file__).parents[2]
TIMEOUT = 90.0
DEVICES = (5, 3)
"""Of ranks 0 and 1."""


class Start(NamedTuple):
    """How a job is started.

    Attributes:
        options: of pytest; None for `python`.
        devices: DEVICE_ID of each process; None for one process, which starts the others.
        variables: of each process, besides.
    """

    options: Sequence[str] | None
    devices: Sequence[int] | None
    variables: dict[str, str]


STARTS = {
    "the tutorial's loop": Start(["-s", "-v"], DEVICES, {"RANK_SIZE": "2"}),
    "python": Start(None, DEVICES, {}),
    "Lightning's launcher": Start([], None, {}),
    "Lightning's launcher without a table": Start(["-s", "-v"], None, {"RANK_TABLE_FILE": ""}),
}
MORE = {"Lightning's launcher without a table", "a device twice"}
ONCE_EACH = "start the script once for each device of the rank table, with a DEVICE_ID of its own"
FAULTS: dict[str, tuple[Start, list[str]]] = {
    "a device twice": (Start(None, (5, 5), {}), [f"are both rank 0; {ONCE_EACH}"] * 2),
    "a failure": (
        Start(["-s", "-v"], DEVICES, {"FAILS": "late"}),
        ["stage 1 (rank 1) failed: MemoryError: no room", "MemoryError: no room"],
    ),
    "a failure before they meet": (
        Start([], None, {"FAILS": "early"}),
        ["ended with exit code 1 before all ranks had met; see what it says"],
    ),
}


def start(number: int, job: Start, command: Sequence[str] | Host, folder: Path) -> list[subprocess.Popen[str]]:
    """The processes that are started by hand, each in a folder of its own."""
    # Addresses of its own, as the port follows from the table.
    server = f"10.{number}.{os.getpid() % 256}.{os.getpid() // 256 % 256}"
    table = write(folder / "table.json", format_rank_table(make_table((server, list(DEVICES))), "v1.0"))
    processes = []
    for index, device in enumerate(job.devices or [None]):
        own = folder / f"device{index}"
        own.mkdir()
        shutil.copy(SCRIPT, own / "script.py")
        variables = {"RESULTS": str(folder), "PYTHONPATH": str(REPOSITORY), "RANK_TABLE_FILE": str(table)}
        variables |= {**job.variables, **({} if device is None else {"DEVICE_ID": str(device)})}
        arguments = [] if job.options is None else [*job.options, "./script.py"]
        if isinstance(command, Host):
            processes.append(command.start([], arguments, cwd=own, **variables, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"))
        else:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
            processes.append(
                subprocess.Popen(
                    [*command, *arguments],
                    cwd=own,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    return processes


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Each process's exit code and output."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def jobs(folder: Path, with_slow: bool) -> dict[str, list[tuple[int, str]]]:
    """How the processes of each job ended. All run at once; those of MORE with slow tests."""
    everything = {**STARTS, **{name: job for name, (job, _) in FAULTS.items()}}
    everything = {name: job for name, job in everything.items() if with_slow or name not in MORE}
    with ExitStack() as stack:
        python, console = (stack.enter_context(closing(Host(script, TIMEOUT))) for script in (SCRIPT, CONSOLE))
        running = {}
        for number, (name, job) in enumerate(everything.items()):
            (folder / name).mkdir()
            running[name] = start(number, job, python if job.options is None else console, folder / name)
        return {name: ended(processes) for name, processes in running.items()}


def test_every_way_to_start_it_trains_the_same(jobs: Any, folder: Path) -> None:
    starts = {name: start for name, start in STARTS.items() if name in jobs}
    for name in starts:
        for exit_code, output in jobs[name]:
            assert exit_code == 0, f"{name}: {output}"
    found = {name: results(folder / name) for name in starts}
    losses = found["python"][0]["losses"]
    assert len(losses) == 3
    for name, job in starts.items():
        for rank, result in enumerate(found[name]):
            assert (result["stage"], result["losses"]) == (rank, losses), name
            environment = "LightningEnvironment" if job.devices is None else "RankTableEnvironment"
            assert result["environment"] == environment, name
            own = folder / name / f"device{rank if job.devices else 0}"
            assert Path(result["folder"]) == own, name
    first, second = (output for _, output in jobs["the tutorial's loop"])
    assert "script.py::test_train" in first and "1 passed" in first and "1 passed" in second
    told = "RANK_ID is not set, so DEVICE_ID=5 makes this process rank 0 (server 10."
    assert told in first and "RANK_ID is not set" not in second


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in FAULTS])
def test_what_goes_wrong_is_told_by_every_process(name: str, jobs: Any) -> None:
    for (exit_code, output), words in zip(jobs[name], FAULTS[name][1], strict=True):
        assert exit_code == 1, output
        assert words in output, output


@pytest.mark.slow
def test_pytests_own_commands(tmp_path: Path) -> None:
    """The command and the module, in interpreters of their own, which Lightning's launcher starts again."""
    commands = {"module": [sys.executable, "-m", "pytest"], "command": [str(Path(sys.executable).with_name("pytest"))]}
    running = {}
    for number, (name, command) in enumerate(commands.items()):
        (tmp_path / name).mkdir()
        job = Start(["-s", "-v"] if number else [], None, {})
        running[name] = start(100 + number, job, command, tmp_path / name)
    for name, processes in running.items():
        for exit_code, output in ended(processes):
            assert exit_code == 0, output
        first, second = results(tmp_path / name)
        assert (first["stage"], second["stage"]) == (0, 1)
        assert first["losses"] == second["losses"]
