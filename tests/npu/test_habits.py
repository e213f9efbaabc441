"""Habits on the simulated NPU: what is on the host, and what is drawn on the device, is so on every rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launching import PATIENCE_S

HABITS = ["HistogramsInHooks", "PlaysEpisodes"]


@pytest.mark.parametrize("configuration", ["2-1f1b", "2-auto"])
def test_habits_are_as_told(configuration: str) -> None:
    command = [sys.executable, "-m", "tests.habits", "--only", *HABITS, "--configuration", configuration]
    environment = {**os.environ, "TESTS_ON": "npu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{configuration}: {len(HABITS)} equal" in done.stdout
