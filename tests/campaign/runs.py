"""Runs of a trial: its processes, what befalls them from outside, and how they end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.campaign.trials import BY_SIGNAL, Trial
from tests.scripts import Host

SCRIPT = Path(__file__).with_name("script.py")
ROOT = Path(__file__).parents[2]
DISK_BYTES = 32 << 20
LEFT_S = 10.0  # how long a trial's processes may outlive its launcher
POLL_S = 0.01


@dataclass
class Ended:
    """How a trial's run ended.

    Attributes:
        exit_code: the launcher's; None if it had not ended in time.
        happened: whether the fault did.
        seconds: from the fault, or the start where there was none, to the end of the last process but one that stays
            stopped.
        stayed: processes that were there longer than they may be.
        output: of all ranks.
    """

    exit_code: int | None = None
    happened: bool = False
    seconds: float = 0.0
    stayed: list[str] = field(default_factory=list)
    output: str = ""


def run(trial: Trial, folder: Path, *, start_up: float, limit: float, host: Host | None = None) -> Ended:
    """Start a trial's script, let what is to befall it befall it, and wait until its processes have ended.

    Args:
        folder: for what it writes.
        start_up: seconds that a run takes before its first step.
        limit: seconds that it may take in all.
        host: runs the script in processes that have imported Lightning, in place of interpreters that start.
    """
    ended = Ended()
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CAMPAIGN_MARK": mark,
        "CAMPAIGN_FOLDER": str(folder),
        "CAMPAIGN_TRIAL": json.dumps(trial.as_dict()),
    }
    launcher = [] if trial.launcher == "lightning" else ["-m", "torch.distributed.run", "--standalone"]
    if launcher:
        launcher += ["--nproc_per_node", str(trial.world)]
    with (folder / "launcher.log").open("wb") as log:
        process: subprocess.Popen[Any]
        if host is not None:
            process = host.start(launcher, [], output=log, **variables)
        else:
            command = [sys.executable, *launcher, str(SCRIPT)]
            own = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "LIGHTNING"))}
            process = subprocess.Popen(
                command, env={**own, **variables}, stdout=log, stderr=log, start_new_session=True
            )
        began = time.monotonic()
        try:
            attack = Attack(trial, folder, process, mark, start_up)
            stopped = attack.stays_stopped and trial.victim == 0 and trial.launcher == "lightning"
            while time.monotonic() - began < limit and process.poll() is None:
                attack.proceed()
                time.sleep(POLL_S)
                if stopped and attack.happened:  # this launcher is not waited for, but the others are
                    time.sleep(20 * POLL_S)
                    if not of(mark, but_of=process.pid):
                        break
                if attack.is_over():  # torchrun waits for a stopped process for ever, whatever it has left to do
                    attack.end_victim()
                    process.terminate()
                    process.wait()
                    break
            ended.exit_code = 0 if attack.was_over else process.poll()
            at_end = time.time()
            if stopped and attack.happened:
                ended.exit_code = 1
            deadline = time.monotonic() + LEFT_S
            while left := of(mark, but_of=process.pid if stopped and attack.happened else None):
                if time.monotonic() > deadline:
                    ended.stayed = [f"{one.pid} {' '.join(cmdline(one))[-120:]} {status(one)}" for one in left]
                    break
                at_end = time.time()
                time.sleep(0.05)
            note = folder / "fault"
            ended.happened = attack.happened or note.exists()
            since = float(note.read_text()) if note.exists() else attack.at or time.time() - (time.monotonic() - began)
            ended.seconds = at_end - since
        finally:
            for one in of(mark):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
    logs = [folder / "launcher.log", *sorted(folder.glob("rank*.log"))]
    ended.output = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs)
    return ended


class Attack:
    """What befalls a rank from outside, when it comes to the trial's phase.

    Attributes:
        happened: whether it has befallen it.
        at: when.
        stays_stopped: the victim does not go on by itself.
        was_over: it had nothing left to do.
    """

    def __init__(self, trial: Trial, folder: Path, launcher: subprocess.Popen, mark: str, start_up: float) -> None:
        self.trial = trial
        self.folder = folder
        self.happened = False
        self.was_over = False
        self.at = 0.0
        self.stays_stopped = trial.kind == "stop"
        self._launcher = launcher
        self._mark = mark
        self._due: float | None = None
        self._continue: tuple[int, float] | None = None
        if trial.phase == "start-up":
            self._due = time.monotonic() + trial.delay * start_up

    def proceed(self) -> None:
        """Do what is due."""
        if self._continue is not None and time.monotonic() > self._continue[1]:
            _send(self._continue[0], signal.SIGCONT)
            self._continue = None
        if self.happened or self.trial.kind not in (*BY_SIGNAL, "interrupt", "disk"):
            return
        if self._due is None:
            phases = self.folder / f"{self.trial.victim}.phases"
            if phases.exists() and self.trial.phase in phases.read_text().splitlines():
                self._due = time.monotonic() + self.trial.delay
        elif time.monotonic() > self._due:
            self._act()

    def is_over(self) -> bool:
        """Whether the victim has been stopped under torchrun when its run had ended, and the others have gone."""
        if self.was_over or not self.stays_stopped or not self.happened or self.trial.launcher != "torchrun":
            return False
        ranks = range(self.trial.world)
        have_ended = all("end" in _lines(self.folder / f"{rank}.phases") for rank in ranks)
        others = [self.folder / f"{rank}.pid" for rank in ranks if rank != self.trial.victim]
        self.was_over = have_ended and not any(map(_is_running, others))
        return self.was_over

    def end_victim(self) -> None:
        """Kill it."""
        victim = self._find()
        if victim is not None:
            _send(victim, signal.SIGKILL)

    def _act(self) -> None:
        kind = self.trial.kind
        if kind == "disk":
            fill(self.folder / "checkpoints")
        elif kind == "interrupt":
            if self._launcher.poll() is not None:
                return
            os.killpg(self._launcher.pid, signal.SIGINT)
        else:
            victim = self._find()
            if victim is None:
                return
            numbers = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
            if not _send(victim, numbers.get(kind, signal.SIGSTOP)):
                return
            if kind == "pause":
                self._continue = victim, time.monotonic() + self.trial.pause * self.trial.timeout
        self.happened, self.at = True, time.time()

    def _find(self) -> int | None:
        """The victim's process, if it is there."""
        told = self.folder / f"{self.trial.victim}.pid"
        if told.exists() and (text := told.read_text()):
            return int(text)
        if self.trial.launcher == "lightning" and self.trial.victim == 0:
            return self._launcher.pid if self._launcher.poll() is None else None
        for one in of(self._mark):
            with suppress(psutil.Error):
                if one.environ().get("LOCAL_RANK") == str(self.trial.victim) and one.ppid() == self._launcher.pid:
                    return one.pid
        return None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _is_running(path: Path) -> bool:
    """Whether the process runs whose number is in a file."""
    return path.exists() and bool(text := path.read_text()) and psutil.pid_exists(int(text))


def of(mark: str, *, but_of: int | None = None) -> list[psutil.Process]:
    """The processes that a trial started, and those that they did.

    Args:
        but_of: without this process and the workers of its loaders, which stay as long as it does.
    """
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, FileNotFoundError):
            variables = one.environ()
            is_left_out = but_of is not None and (
                one.pid == but_of or (one.ppid() == but_of and "LOCAL_RANK" not in variables)
            )
            if variables.get("CAMPAIGN_MARK") == mark and not is_left_out and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def cmdline(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def status(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.status()
    return "gone"


def _send(process: int, number: signal.Signals) -> bool:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True


# -- disks and checkpoints --------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, *, wanted: bool) -> Iterator[None]:
    """A folder for checkpoints, on a small disk of its own where one is wanted."""
    place = folder / "checkpoints"
    place.mkdir(parents=True)
    if not wanted:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def can_mount(folder: Path) -> bool:
    """Whether this process may make a small disk."""
    place = folder / "mountable"
    place.mkdir(exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True)
    if made.returncode == 0:
        subprocess.run(["umount", str(place)], check=True)
    place.rmdir()
    return made.returncode == 0


def fill(disk: Path) -> None:
    """Leave no room."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def make_room(disk: Path) -> None:
    (disk / "filler").unlink(missing_ok=True)


def damage(checkpoints: Path, how: str, where: float) -> str:
    """Damage the last checkpoint, of either kind. Returns what was done."""
    path = checkpoints / "last.ckpt"
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if how == "cut" or file.suffix != ".distcp")
        number = min(int(where * len(files)), len(files) - 1)
        path, where = files[number], where * len(files) - number
    data = bytearray(path.read_bytes())
    if how == "cut":
        place = min(int(where * len(data)), len(data) - 1)
        data = data[:place]
    else:
        places = _bytes_of_structure(path)
        place = places[min(int(where * len(places)), len(places) - 1)]
        data[place] ^= 0x10
    path.write_bytes(data)
    return f"{how} at byte {place} of {path.name}"


def _bytes_of_structure(path: Path) -> list[int]:
    """Where a file has no tensors: a flipped bit there is another number, and formats have nothing to tell it by."""
    places = set(range(path.stat().st_size))
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as records:
            for record in records.infolist():
                if "/data/" in record.filename:  # behind a header with the name, and some padding
                    start = record.header_offset + 30 + len(record.filename)
                    places -= set(range(start, start + record.file_size + 128))
    return sorted(places)


def copy_checkpoints(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)


def weights_of(folder: Path) -> dict[str, Any] | None:
    path = folder / "weights.pt"
    return torch.load(path) if path.exists() else None
