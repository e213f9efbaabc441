"""What goes wrong inside of a trial's processes."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ERROR = "the fault of the campaign"
STEP_S = 0.03  # a step takes at least this, so that what is to happen within steps does
ALLOCATED = 256 << 20  # bytes that each step of a rank without memory asks for


class Saboteur:
    """Notes where a rank is, and lets happen on the victim what the trial says.

    Args:
        trial: the fields of a `Trial`.
        folder: the trial's.
    """

    def __init__(self, trial: dict[str, Any], folder: Path) -> None:
        self.trial = trial
        self.folder = folder
        self.rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        self.is_victim = trial["kind"] != "none" and self.rank == trial["victim"]
        self._process = os.getpid()
        self._seen: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._due = threading.Event()
        self._limited = False
        (folder / f"{self.rank}.pid").write_text(str(os.getpid()))
        if self.is_victim and trial["kind"] in ACTS:
            threading.Thread(target=self._act_when_due, daemon=True).start()
        self.note("start")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_due": None}

    def note(self, phase: str) -> None:
        """This rank has come to a phase."""
        if phase and phase not in self._seen:
            self._seen.add(phase)
            with (self.folder / f"{self.rank}.phases").open("a") as file:
                file.write(f"{phase}\n")
            if phase == self.trial["phase"]:
                self._due.set()
        if phase in ("first step", "steady", ""):
            time.sleep(STEP_S)

    def at(self, owner: str, hook: str) -> None:
        """Called by each hook of the user's."""
        name = f"{owner}.{hook}"
        if not self.is_victim or self.trial["hook"] != name:
            return
        self._calls[name] += 1
        if self._calls[name] != self.trial["call"]:
            return
        self.happens()
        error = self.trial["error"]
        if error == "sys.exit(0)":
            sys.exit(0)
        raise {"ValueError": ValueError, "MemoryError": MemoryError}[error](ERROR)

    def allocate(self) -> None:
        """Called before each training step."""
        if self._limited:
            torch.empty(ALLOCATED, dtype=torch.uint8).fill_(1)

    def wrap(self, kind: type, owner: str, hooks: Sequence[str]) -> None:
        """Have the hooks of a class come to `at` first."""
        for hook in hooks:
            original = vars(kind).get(hook) or getattr(kind, hook)
            setattr(kind, hook, self._wrapped(getattr(original, "__wrapped__", original), owner, hook))

    def _wrapped(self, original: Callable[..., Any], owner: str, hook: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.at(owner, hook)
            return original(*args, **kwargs)

        return call

    def happens(self) -> None:
        """The fault happens now."""
        note = self.folder / "fault.new"
        note.write_text(str(time.time()))
        note.rename(self.folder / "fault")

    def _act_when_due(self) -> None:
        self._due.wait()
        time.sleep(self.trial["delay"])
        self.happens()
        ACTS[self.trial["kind"]](self)

    # -- faults that a thread makes -----------------------------------------------------------------------------------

    def exit(self) -> None:
        os._exit(self.trial["exit_code"])

    def close_connections(self) -> None:
        """Shut down what this rank is connected to; a cable that is pulled out says less."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    connection.getpeername()  # those that listen have none
                    connection.shutdown(socket.SHUT_RDWR)

    def limit_memory(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + self.trial["spare"], resource.RLIM_INFINITY))
        self._limited = True

    def refuse_threads(self) -> None:
        """From now on no thread starts; at its next hook this rank fails, and has to tell without one."""

        def refused(*_: Any, **__: Any) -> None:
            raise RuntimeError("can't start new thread")

        threading._start_new_thread = refused  # type: ignore[attr-defined]
        if hasattr(threading, "_start_joinable_thread"):
            threading._start_joinable_thread = refused


ACTS: dict[str, Callable[[Saboteur], None]] = {
    "exit": Saboteur.exit,
    "close": Saboteur.close_connections,
    "memory": Saboteur.limit_memory,
    "threads": Saboteur.refuse_threads,
}
"""What a thread of the victim does when it has come to the trial's phase."""
