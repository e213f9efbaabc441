"""Modules made at random come out on stages as in one process, or end in an error that names a line or a parameter.

PROGRAMS_FROM, PROGRAMS and PROGRAMS_ON are environment variables with the first seed, their number and the
configurations, for longer hunts.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

from tests.fuzz import programs, steps_in_parts
from tests.habits import driver, harness
from tests.habits.driver import EQUAL as SAME
from tests.habits.driver import ERROR, NO_REFERENCE, judge, run_configuration
from tests.habits.table import HABITS

FIRST, NUMBER = int(os.environ.get("PROGRAMS_FROM", "0")), int(os.environ.get("PROGRAMS", "25"))
CONFIGURATIONS = os.environ.get("PROGRAMS_ON", "2-1f1b 2-interleaved_1f1b 3-zero_bubble").split()
MAKERS: dict[str, Callable[[int, str], str]] = {
    "programs": lambda seed, name: programs.make(seed, name).text(),
    "steps in parts": steps_in_parts.make,
}
TELLS = re.compile(r"(P\d+|fuzz/parts)\.py:\d+|(blocks|head|words|scale)\S* has a hook")
"""What an error has to have: the program's line, or a parameter and what is the matter with it."""


def load(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def run_programs(names: Sequence[str], text: str, folder: str, patience_s: float) -> None:
    """On each rank: as `run_habits`, for programs in files of the folder."""
    for name in names:
        load(Path(folder) / f"{name}.py")
    with mock.patch.object(harness, "load"):
        harness.run_habits(names, text, folder, patience_s)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_programs_come_to_what_one_process_does(configuration: str, kind: str, tmp_path: Path) -> None:
    names = [f"P{seed}" for seed in range(FIRST, FIRST + NUMBER)]
    for seed, name in enumerate(names, FIRST):
        (tmp_path / f"{name}.py").write_text(MAKERS[kind](seed, name))
        load(tmp_path / f"{name}.py")
    habits = [HABITS.pop(name) for name in names]
    told = []
    with mock.patch.object(driver, "run_habits", run_programs):
        list(run_configuration(habits, "1", tmp_path, 60.0))
        list(run_configuration(habits, configuration, tmp_path, 60.0))
    for habit in habits:
        verdict = judge(habit, configuration, tmp_path)
        is_fine = verdict.outcome in (SAME, NO_REFERENCE)  # those that one process refuses show nothing
        if not is_fine and not (verdict.outcome == ERROR and TELLS.search(verdict.differences[0].splitlines()[0])):
            told.append(f"{habit.name}: {verdict.outcome}\n" + "\n".join(verdict.differences[:4]))
    assert not told, "\n".join(told)
