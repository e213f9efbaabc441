"""The processes that a run's first process started: none outlives its failure, and none fails unheard."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

POLL_S = 0.5
PATIENCE_S = 8.0  # how long this process may go on after a child has failed: it should end by itself, and say why
FAREWELL_S = 6.5  # how long the children have when this process ends with an error
EXIT_S = 10.0  # how long this process waits for them when it ends well


class Children:
    """Watches over child processes, from a thread and once more when this process ends.

    Takes the place of Lightning's observer, which kills this process without a word up to 5 s after a child failed,
    and leaves it to its success where a child fails after the last common step.

    Args:
        processes: started by this process.
    """

    def __init__(self, processes: Sequence[subprocess.Popen]) -> None:
        self.failed = False
        """To be set when this process has met an error."""
        self._processes = list(processes)
        threading.Thread(target=self._watch, name="pipeline-children", daemon=True).start()
        atexit.register(self._at_exit)

    def told(self) -> str:
        """The processes that have failed; "" while there are none."""
        return ", ".join(f"process {one.pid} ended with exit code {one.returncode}" for one in self._failures())

    def _watch(self) -> None:
        while any(process.poll() is None for process in self._processes) and not self._failures():
            time.sleep(POLL_S)
        if not self._failures():
            return
        time.sleep(PATIENCE_S)
        print(f"{self.told()}; ending this process too", file=sys.stderr)
        self._end()

    def _at_exit(self) -> None:
        self._wait(FAREWELL_S if self.failed else EXIT_S)
        if self.failed:
            self._kill()
        elif self._failures():
            print(self.told(), file=sys.stderr)
            logging.shutdown()
            self._end()

    def _end(self) -> None:
        """End this process with exit code 1, whatever it is doing."""
        self._kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.02)

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)

    def _failures(self) -> list[subprocess.Popen]:
        return [process for process in self._processes if process.poll()]
