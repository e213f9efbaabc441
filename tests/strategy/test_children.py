"""The process that started others neither outlives their failure nor hides it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import lightning_pipeline
from tests.launching import PATIENCE_S, SOON_S

FILE = Path(lightning_pipeline.__file__).parent / "strategy" / "children.py"
BY_ITSELF = """
import importlib.util, os, subprocess, sys, time
spec = importlib.util.spec_from_file_location("children", {file!r})  # by itself: the package takes seconds
children = importlib.util.module_from_spec(spec)
spec.loader.exec_module(children)
"""
SCRIPT = """
children.POLL_S, children.PATIENCE_S, children.FAREWELL_S = 0.05, 0.3, 0.3
children.NEWS_S, children.EXIT_S = 0.2, 1
process = subprocess.Popen(["sh", "-c", sys.argv[1]])
print(process.pid, flush=True)
watched = children.Children({1: process})
watched.tell = lambda rank, how: print(f"told of rank {rank}: its {how}", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("child", "body", "exit_code", "words"),
    [
        ("exit 3", "time.sleep(300)", 1, "ended with exit code 3; ending this process ("),
        ("sleep 0.3; exit 3", "", 1, "ended with exit code 3"),
        ("exec sleep 60", "watched.failed = True", 0, ""),
        ("sleep 0.5", "", 0, "this process has ended, and waits for rank 1 (process "),
        ("exec sleep 60", "", 1, "went on for 1 s after this process had ended, and was killed"),
        ("exit 0", "watched.is_running = True; time.sleep(300)", 1, "rank 1 failed: its process"),
        ("exit 0", "watched.is_running = True; time.sleep(300)", 1, "told of rank 1: its process"),
        ("exit 0", "time.sleep(0.3); watched.is_running = True; time.sleep(300)", 1, "ended with exit code 0"),
        ("kill -KILL $$", "time.sleep(300)", 1, "was killed by SIGKILL, as the system does when memory runs out"),
        ("kill -TERM $$", "time.sleep(300)", 1, "was ended by SIGTERM"),
    ],
    ids=[
        *("fails alone", "fails at the end", "stays", "ends", "stays too long", "ends early", "told", "ended before"),
        *("killed", "terminated"),
    ],
)
def test_processes_end_together(child: str, body: str, exit_code: int, words: str) -> None:
    command = [sys.executable, "-c", BY_ITSELF.format(file=str(FILE)) + SCRIPT + body, child]
    start = time.monotonic()
    done = subprocess.run(command, text=True, capture_output=True, timeout=PATIENCE_S)
    assert time.monotonic() - start < SOON_S
    assert done.returncode == exit_code, done.stderr
    assert words in done.stderr
    assert not psutil.pid_exists(int(done.stdout))


LAUNCHER = """
children.ORPHAN_S = 0.3
command = [sys.executable, "-c", sys.argv[1]] if sys.argv[1] else ["sleep", "300"]
process = children.start(command, os.environ)
print(process.pid, flush=True)
time.sleep(float(sys.argv[2]))
os._exit(0)
"""
WATCHING = """
children.POLL_S, children.ORPHAN_S = 0.05, 0.3
children.watch_launcher()
assert children.LAUNCHER not in os.environ  # the children of this one are not the launcher's
print("watching", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.1, 0.3], ids="{:g} s".format)
@pytest.mark.parametrize("is_watching", [False, True], ids=["before it watches", "watching"])
def test_no_process_outlives_the_one_that_started_it(is_watching: bool, after: float) -> None:
    if not is_watching and sys.platform != "linux":
        pytest.skip("only Linux ends a process that does not watch yet")
    by_itself = BY_ITSELF.format(file=str(FILE))
    child = by_itself + WATCHING if is_watching else ""
    command = [sys.executable, "-c", by_itself + LAUNCHER, child, str(after)]
    # The output ends when nobody is left who could write to it.
    done = subprocess.run(command, text=True, capture_output=True, timeout=SOON_S)
    pid = int(done.stdout.split()[0])
    deadline = time.monotonic() + SOON_S
    while _is_there(pid):  # it closes its files before it is gone
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if "watching" in done.stdout:
        assert f"which started this one ({pid}), has ended; ending this one too" in done.stderr


def _is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


BY_A_THREAD = """
import threading
def start():
    started.append(children.start([sys.executable, "-c", sys.argv[1]], os.environ, None))
    time.sleep(2)  # until it watches
started = []
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(0.5)
print("exit code:", started[0].poll(), flush=True)
os._exit(0)
"""


def test_a_process_outlives_the_thread_that_started_it() -> None:
    by_itself = BY_ITSELF.format(file=str(FILE))
    command = [sys.executable, "-c", by_itself + BY_A_THREAD, by_itself + WATCHING]
    done = subprocess.run(command, text=True, capture_output=True, timeout=SOON_S)
    assert "watching" in done.stdout
    assert "exit code: None" in done.stdout, done.stderr


STATES = """
import signal
print(watched.told_of([0, 1]))
process.send_signal(signal.SIGSTOP)
while "is stopped" not in watched.told_of([0, 1]):
    time.sleep(0.01)
print(watched.told_of([0, 1]))
print(watched.told_of([0]))
watched.failed = True
"""


def test_what_a_process_does_of_which_nothing_comes() -> None:
    command = [sys.executable, "-c", BY_ITSELF.format(file=str(FILE)) + SCRIPT + STATES, "exec sleep 60"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=PATIENCE_S)
    process, *told = done.stdout.splitlines()
    assert told == [
        f"rank 1's process ({process}) runs, and has not come that far",
        f"rank 1's process is stopped ({process})",
        "",
    ], done.stderr
