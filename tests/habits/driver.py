"""Runs habits in as many launches as it takes, and compares what came of them with one process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import on_device
from tests.habits.harness import Configuration, comparable, place_of, run_habits
from tests.habits.table import Expectation, Habit
from tests.launching import run_ranks

CHUNK = 30
"""Habits that one launch runs."""
PATIENCE_S = 20.0
"""For one habit, on a busy machine. Most take less than a second."""
COMPARED = (
    *("losses", "outputs", "logged", "callback_metrics", "progress_bar_metrics", "gradients", "held"),
    *("state", "checkpoint", "returned", "observed", "printed", "random"),
)
OF_FIRST_RANK = ("state", "checkpoint")
COMPARED_WITH_PLAIN = ("state", "observed")
PLAIN_METRICS_TOLERANCE = 2e-6
ORDERED = ("observed", "outputs", "returned", "losses")
"""Where the order of a dictionary counts."""

EQUAL, AS_TOLD, ERROR, WRONG, HANGS, NO_REFERENCE = (
    "equal",
    "error as told",
    "ERROR",
    "WRONG",
    "HANGS",
    "NO REFERENCE",
)


@dataclass
class Verdict:
    """What came of a habit in a configuration.

    Attributes:
        outcome: one of those above.
        differences: what differs, or the error; the first line says most.
        seconds: that the slowest rank took.
        is_as_told: whether it is what the table says.
    """

    outcome: str
    differences: list[str]
    seconds: float = 0.0
    is_as_told: bool = False


def run_configuration(
    habits: Sequence[Habit], text: str, folder: Path, patience_s: float = PATIENCE_S
) -> Iterator[list[Habit]]:
    """Run habits under one configuration; yields those that are done, launch by launch."""
    world = Configuration.of(text).world
    todo = list(habits)
    for habit in todo:
        shutil.rmtree(place_of(folder, text, habit.name), ignore_errors=True)  # what an earlier run left
    while todo:
        chunk = todo[:CHUNK]
        names = [habit.name for habit in chunk]
        patience = patience_s * (len(chunk) + 1)
        ended = run_ranks(run_habits, names, text, str(folder), patience_s, world=world, timeout=patience)
        done = 0
        for habit in chunk:
            records = load_records(folder, text, habit.name, world)
            if all(record is None for record in records) and done:
                break  # the one before it ended this launch
            done += 1
            if any(record is None or "error" in record for record in records):
                for rank, record in enumerate(records):
                    if record is None:
                        note_silence(folder, text, habit.name, rank, ended[rank])
                if world > 1 or any(record is None for record in records):
                    break
        yield chunk[:done]
        todo = todo[done:]


def note_silence(folder: Path, text: str, name: str, rank: int, ended: Any) -> None:
    """Note why a rank has no record."""
    place = place_of(folder, text, name)
    place.mkdir(parents=True, exist_ok=True)
    hang = place / f"hang{rank}.txt"
    where = hang.read_text() if hang.exists() else ""
    said = f"{where}\n{ended.traceback or ended.error}\n{ended.log}".strip()
    torch.save(
        {
            "error": "no answer in time" if where else "its process ended",
            "silent": True,
            "traceback": said,
            "causes": [],
            "hangs": bool(where),
        },
        place / f"rank{rank}.pt",
    )


def load_records(folder: Path, text: str, name: str, world: int) -> list[Any]:
    """What each rank has recorded of a habit; None where it has not."""
    place = place_of(folder, text, name)
    paths = [place / f"rank{rank}.pt" for rank in range(world)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def judge(habit: Habit, text: str, folder: Path, *, ignored: Sequence[str] = ()) -> Verdict:
    """Compare what is on disk with what one process came to, but for the parts that are `ignored`."""
    configuration = Configuration.of(text)
    records = load_records(folder, text, habit.name, configuration.world)
    [expected] = load_records(folder, "1", habit.name, 1)
    seconds = max((record.get("seconds", 0.0) for record in records if record), default=0.0)
    verdict = _judge(habit, configuration, records, expected, folder, text, ignored)
    verdict.seconds = seconds
    told = habit.expected_of(text)
    verdict.is_as_told = verdict.outcome == (WRONG if told.differs else EQUAL if told.pattern is None else AS_TOLD)
    return verdict


def _judge(
    habit: Habit,
    configuration: Configuration,
    records: list[Any],
    expected: Any,
    folder: Path,
    text: str,
    ignored: Sequence[str],
) -> Verdict:
    failed = {rank: record for rank, record in enumerate(records) if record is None or "error" in record}
    has_no_reference = expected is None or "error" in expected
    if has_no_reference and not (failed and habit.expected_of(text).pattern):
        told = f"{expected['error']}\n{expected['traceback']}" if expected else "one process did not run it"
        return Verdict(NO_REFERENCE, [told])
    if failed:
        return _of_failure(habit.expected_of(text), failed)
    compared = COMPARED_WITH_PLAIN if configuration.kind == "plain" else COMPARED
    tolerance = habit.plain_tolerance if configuration.kind == "plain" else habit.tolerance
    if configuration.replicas > 1:
        tolerance = max(tolerance, 2e-6)  # sums over replicas
    if on_device.DEVICE != "cpu":
        tolerance = max(tolerance, 1e-5)  # some of its kernels add up in any order
    differences = []
    for rank, record in enumerate(records):
        for part in compared:
            if part in ignored or (part in OF_FIRST_RANK and rank):
                continue
            partial = part in ("gradients", "held") and configuration.stages > 1
            found = compare(record[part], expected[part], part, tolerance, ordered=part in ORDERED, partial=partial)
            differences += [f"rank {rank}: {difference}" for difference in found]
    if configuration.data_parallel == "fsdp":  # after whose run ranks go on with their parts
        differences = [line for line in differences if " without data' instead of " not in line]
    if configuration.stages > 1 and "gradients" not in ignored:
        differences += missing_gradients(records, expected)
    if configuration.kind == "plain":
        # Sums over the samples of a batch are put together in another order.
        found, wanted = (evaluated(one["callback_metrics"][-1]) for one in (records[0], expected))
        differences += compare(found, wanted, "callback_metrics", max(tolerance, PLAIN_METRICS_TOLERANCE))
    else:
        found, wanted = (files(place_of(folder, each, habit.name) / "files") for each in (text, "1"))
        if configuration.schedule == "auto":  # a logger notes the plan
            found, wanted = (
                {n: f for n, f in one.items() if not n.endswith("hparams.yaml")} for one in (found, wanted)
            )
        differences += compare(found, wanted, "files", tolerance)
    return Verdict(WRONG if differences else EQUAL, differences)


def evaluated(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those of evaluation: a step in training logs the mean of its batch, and plain Lightning of each micro-batch."""
    return {name: value for name, value in metrics.items() if name.startswith(("val", "test"))}


def _of_failure(expected: Expectation, failed: Mapping[int, Any]) -> Verdict:
    """An error, expected or not, or a hang."""
    told = [
        f"rank {rank}: {record['error']}\n{record['traceback']}"
        for rank, record in sorted(failed.items(), key=lambda item: _is_of_a_peer(item[1]))
        if record is not None
    ]
    silent = [rank for rank, record in failed.items() if record is None or record.get("hangs")]
    if silent or any("PipelineTimeoutError" in record["error"] for record in failed.values() if record):
        return Verdict(HANGS, told)
    pattern = expected.pattern
    causes = [cause for record in failed.values() for cause in record["causes"]]
    if pattern is not None and any(re.search(pattern, cause, re.DOTALL) for cause in causes):
        return Verdict(AS_TOLD, told)
    return Verdict(ERROR, told)


def _is_of_a_peer(record: Any) -> bool:
    """Whether an error only says that another rank failed."""
    return record is None or record.get("silent", False) or record["error"].startswith("PeerFailedError")


def missing_gradients(records: Sequence[Any], expected: Any) -> list[str]:
    """Gradients of one process that no rank has."""
    missing = []
    for step, gradients in enumerate(expected["gradients"]):
        together = {name for record in records if step < len(record["gradients"]) for name in record["gradients"][step]}
        missing += [f"no rank: gradients[{step}]: {name} has none" for name in gradients if name not in together]
    return missing


def files(folder: Path) -> dict[str, Any]:
    """What was written, by path: the contents of torch's files, and the bytes of others."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")) if folder.exists() else ():
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            if path.suffix in (".ckpt", ".pt", ".pth"):
                content = torch.load(path, weights_only=False)
                if isinstance(content, dict) and "state_dict" in content:
                    kept = ("state_dict", "optimizer_states", "epoch")
                    content = {key: content[key] for key in kept if key in content}
                found[name] = comparable(content)
            else:
                found[name] = path.read_bytes()
    return found


def compare(
    found: Any, expected: Any, path: str, tolerance: float = 0.0, *, ordered: bool = False, partial: bool = False
) -> list[str]:
    """What differs between two comparable values, a line each.

    Args:
        tolerance: relative to the largest element; 0 is bit for bit.
        ordered: the order of dictionaries counts.
        partial: dictionaries may lack what is expected, but have nothing else.
    """
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        return _compare_arrays(found, expected, path, tolerance)
    if type(found) is not type(expected):
        return [f"{path}: {shown(found)} instead of {shown(expected)}"]
    again = {"tolerance": tolerance, "ordered": ordered, "partial": partial}
    if isinstance(expected, dict):
        lines = []
        extra = [key for key in found if key not in expected]
        missing = [] if partial else [key for key in expected if key not in found]
        if extra or missing:
            odd = [f"has {extra}"] * bool(extra) + [f"lacks {missing}"] * bool(missing)
            lines.append(f"{path}: {' and '.join(odd)}")
        elif ordered and list(found) != list(expected):
            lines.append(f"{path}: keys in the order {list(found)} instead of {list(expected)}")
        for key in expected:
            if key in found:
                lines += compare(found[key], expected[key], f"{path}.{key}", **again)
        return lines
    if isinstance(expected, (list, tuple)):
        lines = []
        if len(found) != len(expected):
            lines.append(f"{path}: {len(found)} entries instead of {len(expected)}")
        for number, (one, other) in enumerate(zip(found, expected, strict=False)):
            lines += compare(one, other, f"{path}[{number}]", **again)
        return lines
    if isinstance(expected, float):
        return _compare_arrays(np.array(found), np.array(expected), path, tolerance)
    return [] if found == expected else [f"{path}: {shown(found)} instead of {shown(expected)}"]


def _compare_arrays(found: np.ndarray, expected: np.ndarray, path: str, tolerance: float) -> list[str]:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return [f"{path}: {found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"]
    is_float = expected.dtype.kind in "fc"
    if np.array_equal(found, expected, equal_nan=is_float):
        return []
    if is_float:
        largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        with np.errstate(invalid="ignore"):
            off = np.abs(found - expected)
        if np.isfinite(off).all() and off.max() <= tolerance * largest:
            return []
        if found.size == 1:
            return [f"{path}: {found.item():.9g} instead of {expected.item():.9g}"]
        finite = off[np.isfinite(off)].max(initial=0.0)
        odd = "" if np.isfinite(off).all() else ", with infinities or NaN"
        return [f"{path}: off by {finite:.3g} where the largest is {largest:.3g}{odd}"]
    return [f"{path}: {shown(found.tolist())} instead of {shown(expected.tolist())}"]


def shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 70 else f"{text[:70]}..."
