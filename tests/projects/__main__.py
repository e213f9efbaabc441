"""Trains models of public packages, each as a program of its own, plainly and on one and two stages, and compares.

`make test-projects ARGS="darts gluonts:DeepAR"` runs `python -m tests.projects` with these.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.launching import free_port
from tests.projects.configurations import CONFIGURATIONS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUFFIX = "_project"
COMPARED_WITH = {"whole": "plain", "auto": "one", "key": "one"}


class Facts(NamedTuple):
    """What a script tells of a case, see `common.Case`."""

    draws: bool
    has_key: bool
    refused: str


class Ended(NamedTuple):
    """How a run ended: its error in a line, or what each of its ranks left."""

    error: str
    outcomes: list[dict[str, Any]]
    seconds: float = 0.0


def main() -> int:
    projects = sorted(path.stem.removesuffix(SUFFIX) for path in HERE.glob(f"*{SUFFIX}.py"))
    parser = argparse.ArgumentParser(prog="python -m tests.projects", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a package or package:case (default: all)")
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=CONFIGURATIONS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".projects" / "runs", help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one run, default: %(default)s")
    arguments = parser.parse_args()
    asked = arguments.names or projects
    if unknown := {name.partition(":")[0] for name in asked} - {*projects}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(projects)}")
    failed = 0
    for project in projects:
        wanted = [name for name in asked if name.partition(":")[0] == project]
        if not wanted:
            continue
        error, listed, _ = _program(project, ["--list"], arguments.folder / project, arguments.timeout)
        if error:
            print(f"{project}: {error}", flush=True)
            failed += 1
            continue
        cases = {name: Facts(*facts) for name, facts in json.loads(listed).items()}
        if unknown := {name for name in wanted if name != project} - {f"{project}:{case}" for case in cases}:
            parser.error(f"there is no {', '.join(sorted(unknown))}; {project} has {', '.join(cases)}")
        for case, facts in cases.items():
            if project in wanted or f"{project}:{case}" in wanted:
                print(f"{project}: {case}", flush=True)
                failed += _compare(project, case, facts, arguments)
    print(f"{failed} failed")
    return int(failed > 0)


def _compare(project: str, case: str, facts: Facts, arguments: argparse.Namespace) -> int:
    """Run a case's configurations and print how each went; returns how many failed."""
    runs: dict[str, Ended] = {}
    failed = 0
    for configuration in arguments.configurations:
        if configuration == "key" and not facts.has_key:
            continue
        folder = arguments.folder / project / re.sub(r"\W+", "_", case) / configuration
        shutil.rmtree(folder, ignore_errors=True)
        ended = runs[configuration] = _run(project, case, configuration, folder, arguments.timeout)
        other = COMPARED_WITH.get(configuration, configuration)
        if configuration == "auto" and facts.refused:
            is_right = facts.refused in ended.error
            verdict = f"refused, as expected: {ended.error}" if is_right else f"not refused: {ended.error or 'ran'}"
        elif ended.error:
            verdict, is_right = ended.error, False
        elif other not in runs or runs[other].error:
            verdict, is_right = "ran", True
        elif other == configuration:
            verdict, is_right = _sizes(ended), True
        else:
            differences = _differences(ended, runs[other])
            is_right = not differences
            verdict = f"equal to {other}" if is_right else f"differs from {other}: {'; '.join(differences)}"
            if differences and facts.draws and other == "plain":
                verdict, is_right = f"not compared with {other}, as the model draws random numbers", True
            if configuration in ("auto", "key"):
                verdict += f" ({_sizes(ended)})"
        failed += not is_right
        print(f"  {configuration:5}  {ended.seconds:4.0f} s  {verdict}", flush=True)
    return failed


def _run(project: str, case: str, configuration: str, folder: Path, timeout: float) -> Ended:
    options = ["--case", case, "--configuration", configuration, "--folder", str(folder)]
    error, _, seconds = _program(project, options, folder, timeout)
    if error:
        return Ended(error, [], seconds)
    num_ranks = 2 if configuration in ("auto", "key") else 1
    files = [folder / f"rank{rank}.pt" for rank in range(num_ranks)]
    deadline = time.monotonic() + 30  # the first rank does not wait for the others to end
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.2)
    if missing := [file.name for file in files if not file.exists()]:
        return Ended(f"ended without {', '.join(missing)}; see {folder / 'log.txt'}", [], seconds)
    time.sleep(0.2)
    return Ended("", [torch.load(file, weights_only=False) for file in files], seconds)


def _program(project: str, options: list[str], folder: Path, timeout: float) -> tuple[str, str, float]:
    """Run a project's script in a session of its own; its error, if any, its output, and how long it took."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "agg",
    }
    started, log = time.monotonic(), folder / "log.txt"
    own = ROOT / ".projects" / project / "bin" / "python"
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(own) if own.exists() else sys.executable, str(HERE / f"{project}{SUFFIX}.py"), *options],
            stdout=subprocess.PIPE if options == ["--list"] else file,
            stderr=file,
            cwd=folder,
            env=environment,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
            error = "" if process.returncode == 0 else _last_error(log) or f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            output, error = "", f"did not end in {timeout:.0f} s, see {log}"
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return error, output or "", time.monotonic() - started


def _last_error(log: Path) -> str:
    """The exception that the first rank that failed ended with: others tell of it in a line of their own."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in log.read_text(errors="replace").splitlines()]
    found = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return found[-1] if found else ""


def _sizes(ended: Ended) -> str:
    held = "+".join(str(len(outcome["held"])) for outcome in ended.outcomes)
    first = ended.outcomes[0]
    return f"{first['steps']} steps, {len(first['rows'])} logged rows, {held} parameters"


def _differences(ended: Ended, other: Ended) -> list[str]:
    """In what the ranks of a run and one rank's run differ: nothing where they are equal bit for bit."""
    reference = other.outcomes[0]
    found = []
    for rank, outcome in enumerate(ended.outcomes):
        for kind in ("weights", "metrics", "steps", "extras", *(["rows"] if rank == 0 else [])):
            one, two = _leaves(reference[kind]), _leaves(outcome[kind])
            names = [name for name in {**one, **two} if name not in one or name not in two]
            if kind == "extras" and rank > 0:  # code for the first rank alone makes some
                names = [name for name in names if name in two]
            if names:
                found.append(f"rank {rank}: {kind} has or lacks {', '.join(names[:3])}")
            largest = {name: _distance(one[name], two[name]) for name in one if name in two}
            unlike = [name for name, distance in largest.items() if distance]
            if unlike:
                worst = max(unlike, key=lambda name: largest[name])
                found.append(
                    f"rank {rank}: {len(unlike)} of {len(largest)} {kind}, {worst} by {largest[worst]:.1e} relative"
                )
    if len(ended.outcomes) > 1:
        held = [set(outcome["held"]) for outcome in ended.outcomes]
        if not all(held) or held[0] >= set().union(*held) <= held[1]:
            found.append("one rank holds everything")
    return found


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """The tensors, numbers and strings in containers, by path."""
    if isinstance(value, dict):
        return {path: leaf for key, entry in value.items() for path, leaf in _leaves(entry, f"{name}.{key}").items()}
    if isinstance(value, list | tuple):
        return {path: leaf for i, entry in enumerate(value) for path, leaf in _leaves(entry, f"{name}.{i}").items()}
    return {name.removeprefix("."): value}


def _distance(one: Any, two: Any) -> float:
    """0 if equal bit for bit (NaNs too), else the largest relative difference."""
    if isinstance(one, str) or one is None:
        if one == two:
            return 0.0
        try:
            one, two = float(one), float(two)
        except (TypeError, ValueError):
            return float("inf")
    one, two = torch.as_tensor(one), torch.as_tensor(two)
    if one.shape != two.shape or one.dtype != two.dtype:
        return float("inf")
    if torch.equal(one.nan_to_num(1e30), two.nan_to_num(1e30)) and torch.equal(one.isnan(), two.isnan()):
        return 0.0
    difference = (one.double() - two.double()).abs().max()
    return max(float(difference / one.double().abs().max().clamp_min(1e-30)), 1e-30)


if __name__ == "__main__":
    sys.exit(main())
