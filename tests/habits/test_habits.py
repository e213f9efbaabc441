"""Modules with the habits of real users come out on stages as in one process, or end in an error that says what to do.

`python -m tests.habits` runs chosen ones, and shows more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.habits.driver import PATIENCE_S, WRONG, judge, run_configuration
from tests.habits.harness import CONFIGURATIONS
from tests.habits.table import HABITS, load

pytestmark = pytest.mark.multiprocess

load()


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Names of the habits that this session tests, by configuration."""
    found: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            parameters = item.callspec.params
            found.setdefault(parameters["configuration"], []).append(parameters["name"])
    return found


@pytest.fixture(scope="module")
def reference(asked: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what came of every habit in one process."""
    folder = tmp_path_factory.mktemp("habits")
    names = {name for each in asked.values() for name in each}
    list(run_configuration([habit for habit in HABITS.values() if habit.name in names], "1", folder, 3 * PATIENCE_S))
    return folder


@pytest.fixture(scope="module")
def folder(configuration: str, asked: dict[str, list[str]], reference: Path) -> Path:
    """The same with what came of them under this configuration."""
    habits = [HABITS[name] for name in asked[configuration]]
    list(run_configuration(habits, configuration, reference, 3 * PATIENCE_S))
    return reference


def each_habit(*configurations: str) -> list[object]:
    """Habits by configuration: what is launched together follows one another.

    All of them run on two stages under 1f1b, and each under one of the other configurations as well; where there is
    time, under all.
    """
    others = [each for each in CONFIGURATIONS if each != "2-1f1b"]
    applies = {"plain": lambda habit: habit.plain, "without": lambda habit: habit.without is not None}
    found = []
    for configuration in configurations:
        for number, habit in enumerate(HABITS.values()):
            if applies.get(configuration, lambda _: True)(habit):
                is_slow = configuration in others and others[number % len(others)] != configuration
                marks = [pytest.mark.slow] * is_slow
                found.append(pytest.param(habit.name, configuration, id=f"{configuration}-{habit.name}", marks=marks))
    return found


@pytest.fixture(scope="module")
def configuration(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(("name", "configuration"), each_habit(*CONFIGURATIONS), indirect=["configuration"])
def test_stages_come_to_what_one_process_does(name: str, configuration: str, folder: Path) -> None:
    habit = HABITS[name]
    verdict = judge(habit, configuration, folder)
    assert verdict.is_as_told, f"{verdict.outcome}, expected {habit.expectation}\n" + "\n".join(verdict.differences)


@pytest.mark.parametrize(("name", "configuration"), each_habit("plain"), indirect=["configuration"])
def test_one_process_has_the_bits_of_plain_lightning(name: str, configuration: str, folder: Path) -> None:
    verdict = judge(HABITS[name], configuration, folder)
    assert verdict.is_as_told, f"{verdict.outcome}\n" + "\n".join(verdict.differences)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "configuration"), each_habit("without"), indirect=["configuration"])
def test_what_is_compared_shows_the_habit(name: str, configuration: str, folder: Path) -> None:
    verdict = judge(HABITS[name], configuration, folder)
    assert verdict.outcome == WRONG, f"{verdict.outcome}\n" + "\n".join(verdict.differences)
