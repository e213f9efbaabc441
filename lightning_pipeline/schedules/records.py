"""The file that a run writes as it goes: one line of JSON for the run, then one for each recorded step.

A run that is killed leaves at most its last line unfinished, which readers leave out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_pipeline.schedules.schedule import Action
from lightning_pipeline.schedules.timeline import extent, some_of
from lightning_pipeline.schedules.validation import (
    MAX_PROCESSES,
    MAX_TIME,
    MAX_TRACE_BYTES,
    ScheduleError,
    read_text,
    shown,
)

MAX_FILE_BYTES = 32 * 2**20
"""Of records; a longer run begins a new file, and keeps the one before."""
MAX_STEPS = 200
"""Steps that are read of a file, the last ones and the first ones among them."""


@dataclass
class RecordedStep:
    """One rank's step, in seconds.

    Attributes:
        reductions: start and end of the all-reduce of each bucket of gradients, in the order in which they started.
        peak_live: the most activations of virtual stages that were live at once in a step so far.
        memory: the most bytes that the device's tensors took so far; on the CPU, that the process took.
        offload: the share of activations that goes to host memory while they wait; where there is one, also:
        live_bytes: the most bytes that saved tensors took on the device at once in the step.
        kept: bytes that each virtual stage saved of a micro-batch.
        away: those of them that went to host memory.
    """

    rank: int
    actions: list[tuple[Action, float, float]] = field(default_factory=list)
    reductions: list[tuple[float, float]] = field(default_factory=list)
    peak_live: float = 0
    sent: dict[Action, int] = field(default_factory=dict)
    memory: int = 0
    offload: float = 0
    live_bytes: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    away: dict[int, int] = field(default_factory=dict)

    def moved(self, seconds: float) -> RecordedStep:
        """A copy with all times moved later by `seconds`."""
        actions = [(action, start + seconds, end + seconds) for action, start, end in self.actions]
        reductions = [(start + seconds, end + seconds) for start, end in self.reductions]
        return replace(self, actions=actions, reductions=reductions)


Pipelines = Sequence[Sequence[RecordedStep]]
"""Recordings by replica and place in the pipeline."""


@dataclass
class Records:
    """What a file of records tells.

    Attributes:
        run: what holds for all steps; see `PipelineTimeline`.
        steps: number of the optimizer step, when it ended (seconds since 1970), and every rank's recording.
        advice: the plan of the cut, and what moving modules would gain; empty if the run did not come to it.
        num_steps: steps in the file, of which `steps` may be a part.
    """

    run: dict[str, Any]
    steps: list[tuple[int, float, list[list[RecordedStep]]]]
    advice: dict[str, Any]
    num_steps: int


class RecordFile:
    """Appends to a file of records, and has each line on the disk's cache before it returns.

    Args:
        path: replaced if it exists.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path, self._run = path, run
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier_of(path).unlink(missing_ok=True)
        path.write_text(_line("run", run), encoding="utf-8")

    def add_step(self, number: int, time: float, pipelines: Pipelines) -> None:
        """Append what the ranks recorded of a step."""
        begin, _ = extent([rank.actions for pipeline in pipelines for rank in pipeline])
        recorded = [[_as_builtins(rank.moved(-begin)) for rank in pipeline] for pipeline in pipelines]
        if self.path.stat().st_size > MAX_FILE_BYTES:
            self.path.replace(earlier_of(self.path))
            self.path.write_text(_line("run", self._run), encoding="utf-8")
        self._append(_line("step", {"step": number, "time": time, "pipelines": recorded}))

    def add_advice(self, advice: dict[str, Any]) -> None:
        """Append what is known of the cut."""
        self._append(_line("advice", advice))

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)


def earlier_of(path: Path) -> Path:
    """Where the steps before those of a file of records are, if they were too many for one file."""
    return path.with_suffix(f".earlier{path.suffix}")


def read_last(path: str | PathLike[str]) -> Records:
    """Read only the last whole step of a file of records, which takes no longer as the file grows."""
    with Path(path).open("rb") as file:
        first = file.readline()
        size = file.seek(0, os.SEEK_END)
        lines: list[bytes] = []
        for reach in (2**16, 2**20, MAX_TRACE_BYTES):  # of most runs a step has some thousand bytes
            file.seek(max(len(first), size - reach))
            whole = [line for line in file.read(reach).splitlines(keepends=True) if line.endswith(b"\n")]
            lines = [line for line in (whole if size - reach <= len(first) else whole[1:]) if b'"kind":"step"' in line]
            if lines or size <= reach:
                break
    return _records([first.decode(errors="replace"), *(line.decode(errors="replace") for line in lines[-1:])], path)


def read_records(path: str | PathLike[str]) -> Records:
    """Read a file of records, and what came before it."""
    path = Path(path)
    before = earlier_of(path)
    lines: list[str] = []
    for file in (*([before] if before.is_file() else []), path):
        try:
            lines += read_text(file, kind="a record of steps", most=MAX_TRACE_BYTES).splitlines(keepends=True)
        except ValueError as error:
            raise ScheduleError(str(error)) from None
    return _records(lines, path)


def _records(lines: Sequence[str], path: str | PathLike[str]) -> Records:
    run: dict[str, Any] = {}
    advice: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    try:
        for line in lines:
            if not line.endswith("\n"):
                continue  # the run was killed here
            content = json.loads(line)
            kind = content["kind"]
            if kind == "step":
                steps.append(content)
            else:
                {"run": run, "advice": advice}[kind].update(content)
        if not steps:
            raise ScheduleError(f"{path} has no whole step yet; PipelineTimeline records every every_n_steps steps")
        read = [
            (int(_number(s["step"])), _number(s["time"]), [[_rank(r) for r in ranks] for ranks in s["pipelines"]])
            for s in (steps[index] for index in some_of(len(steps), MAX_STEPS))
        ]
        for _, _, pipelines in read:
            extent([rank.actions for pipeline in pipelines for rank in pipeline])
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(f"{path} is no record of steps ({type(error).__name__}: {error})") from None
    return Records(run, read, advice, len(steps))


def _line(kind: str, content: dict[str, Any]) -> str:
    return json.dumps({"kind": kind, **content}, separators=(",", ":")) + "\n"


def _as_builtins(rank: RecordedStep) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "actions": [[str(action), round(start, 7), round(end, 7)] for action, start, end in rank.actions],
        "reductions": [[round(start, 7), round(end, 7)] for start, end in rank.reductions],
        "peak_live": rank.peak_live,
        "sent": {str(action): size for action, size in rank.sent.items()},
        "memory": rank.memory,
        "offload": rank.offload,
    }


def _rank(content: dict[str, Any]) -> RecordedStep:
    return RecordedStep(
        int(_number(content["rank"], MAX_PROCESSES)),
        [(Action.parse(name), _number(start), _number(end)) for name, start, end in content["actions"]],
        [(_number(start), _number(end)) for start, end in content["reductions"]],
        _number(content["peak_live"]),
        {Action.parse(name): int(_number(size, 2**63)) for name, size in content["sent"].items()},
        int(_number(content["memory"], 2**63)),
        _number(content.get("offload", 0), 2),
    )


def _number(value: Any, most: float = MAX_TIME) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MAX_TIME < value < most:
        raise ValueError(f"{shown(value)} is not a number below {most:g}")
    return value
