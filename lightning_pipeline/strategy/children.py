"""Child processes of a run: they end together, and every failure is reported.

This imports the standard library only, so that its tests need not wait for torch.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

POLL_S = 0.5
PATIENCE_S = 8.0  # how long this process may go on after a child has failed: it should end by itself, with a reason
FAREWELL_S = 6.5  # how long this process waits for the children when it ends with an error
NEWS_S = 10.0  # when it ends well: after how long it prints that it waits for them
EXIT_S = 60.0  # and how long it waits in all
ORPHAN_S = 5.0  # how long a child may go on after this process is gone: it should end by itself, with a reason

LAUNCHER = "LIGHTNING_PIPELINE_LAUNCHER"
"""The variable that tells a child which process started it."""

# Before it runs the script, a child asks Linux to kill it when its launcher ends: importing torch takes seconds, and
# the script may take any time before it comes to this package. The launcher may have died even before that. Where
# the interpreter is a script that starts another one, the launcher is an ancestor and not the parent.
_GUARDED = """
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
except Exception:
    pass
try:
    state = open(f"/proc/{sys.argv[1]}/stat").read().rpartition(")")[2].split()[0]
except OSError:
    state = "X"
if os.getppid() != int(sys.argv[1]) and state in "ZX":
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def start(command: Sequence[str], environment: Mapping[str, str], folder: str | None = None) -> subprocess.Popen:
    """Start a process that does not outlive this one: from its start on Linux, else from `watch_launcher` on."""
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _GUARDED, str(os.getpid()), *command]
    return subprocess.Popen(command, env={**environment, LAUNCHER: str(os.getpid())}, cwd=folder)


def watch_launcher() -> None:
    """In a process that `start` has started: from now on a thread ends it when its launcher has ended.

    This replaces Linux's own guard, which depends on the thread that called `start`, not on the process, and leaves no
    time to give a reason.
    """
    launcher = os.environ.pop(LAUNCHER, "")
    if launcher:
        threading.Thread(target=_end_with, args=(int(launcher),), name="pipeline-launcher", daemon=True).start()
        with contextlib.suppress(Exception):  # without this call, or without ctypes
            import ctypes

            ctypes.CDLL(None).prctl(1, 0)


def _end_with(launcher: int) -> None:
    """End this process some seconds after its launcher has ended."""
    is_parent = os.getppid() == launcher
    while os.getppid() == launcher if is_parent else _exists(launcher):
        time.sleep(POLL_S)
    time.sleep(ORPHAN_S)
    _end_process(f"process {launcher}, which started this one ({os.getpid()}), has ended; ending this one too")


def _state(process: int) -> str:
    """Linux's letter for the state of a process: T if it is stopped, Z if it has ended; "" elsewhere."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _exists(process: int) -> bool:
    """Whether a process runs. A zombie has ended, which only Linux tells."""
    if state := _state(process):
        return state not in ("Z", "X")
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class Children:
    """Watches over child processes, in a thread and when this process ends.

    It replaces Lightning's observer, which kills this process without a message up to 5 s after a child has failed, and
    lets it succeed where a child fails after the last common step.
    """

    def __init__(self, processes: Mapping[int, subprocess.Popen]) -> None:
        self.failed = False
        """To be set when this process fails."""
        self.is_running = False
        """A run is underway, during which no child may end, with any exit code."""
        self.tell: Callable[[int, str], None] = lambda rank, how: None
        """Called with the rank of the first child that failed, and how it ended."""
        self._processes = dict(processes)
        atexit.register(self._at_exit)
        try:
            threading.Thread(target=self._watch, name="pipeline-children", daemon=True).start()
        except BaseException:
            self.failed = True
            raise

    def told(self) -> str:
        """A text on the processes that have failed; "" while there are none."""
        return "; ".join(f"rank {rank} failed: its {how}" for rank, how in self._failures().items())

    def told_of(self, ranks: Sequence[int]) -> str:
        """A text on what silent ranks' processes do."""
        found = {rank: _state(self._processes[rank].pid) for rank in ranks if rank in self._processes}
        return "; ".join(
            f"rank {rank}'s process is stopped ({self._processes[rank].pid})"
            if state in ("T", "t")
            else f"rank {rank}'s process ({self._processes[rank].pid}) runs, and has not come that far"
            for rank, state in found.items()
        )

    def _watch(self) -> None:
        while not (failures := self._failures()):
            time.sleep(POLL_S)
        told = self.told()
        self.tell(*next(iter(failures.items())))
        time.sleep(PATIENCE_S)
        self._kill()
        _end_process(f"{told}; ending this process ({os.getpid()}) too")

    def _at_exit(self) -> None:
        if self.failed:
            self._wait(FAREWELL_S)
            self._kill()
            return
        self._wait(NEWS_S)
        if left := self._running():
            print(f"this process has ended, and waits for {left}", file=sys.stderr, flush=True)
            self._wait(EXIT_S - NEWS_S)
        if left := self._running():
            self._kill()
            logging.shutdown()
            _end_process(f"{left} went on for {EXIT_S:g} s after this process had ended, and was killed")
        if self._failures():
            logging.shutdown()
            _end_process(self.told())

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._running():
            time.sleep(0.02)

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)

    def _running(self) -> str:
        """A text on the processes that have not ended; "" if all have."""
        running = {rank: process.pid for rank, process in self._processes.items() if process.poll() is None}
        return ", ".join(f"rank {rank} (process {pid})" for rank, pid in running.items())

    def _failures(self) -> dict[int, str]:
        """How processes ended that should not have, by rank."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {
            rank: _described(self._processes[rank].pid, code)
            for rank, code in codes.items()
            if code or (code == 0 and self.is_running)
        }


def _described(process: int, exit_code: int) -> str:
    """How a process ended."""
    if exit_code == -signal.SIGKILL:
        return f"process {process} was killed by SIGKILL, as the system does when memory runs out"
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"process {process} was ended by {signal.Signals(-exit_code).name}"
    return f"process {process} ended with exit code {exit_code}"


def _end_process(told: str) -> None:
    """End this process with exit code 1, whatever it is doing."""
    with contextlib.suppress(Exception):
        print(told, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
