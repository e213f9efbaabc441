"""The process that started others neither outlives their failure nor hides it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import lightning_pipeline
from tests.launching import PATIENCE_S, SOON_S

SCRIPT = """
import importlib.util, subprocess, sys, time
spec = importlib.util.spec_from_file_location("children", sys.argv[1])  # by itself: the package takes seconds
children = importlib.util.module_from_spec(spec)
spec.loader.exec_module(children)
children.POLL_S, children.PATIENCE_S, children.FAREWELL_S = 0.05, 0.3, 0.3
process = subprocess.Popen(["sh", "-c", sys.argv[2]])
print(process.pid, flush=True)
watched = children.Children(dict([(1, process)]))
{body}
"""


@pytest.mark.parametrize(
    ("child", "body", "exit_code", "words"),
    [
        ("exit 3", "time.sleep(300)", 1, "ended with exit code 3; ending this process ("),
        ("sleep 0.3; exit 3", "", 1, "ended with exit code 3"),
        ("exec sleep 60", "watched.failed = True", 0, ""),
        ("sleep 0.3", "", 0, ""),
    ],
    ids=["fails alone", "fails at the end", "stays", "ends"],
)
def test_processes_end_together(child: str, body: str, exit_code: int, words: str) -> None:
    file = Path(lightning_pipeline.__file__).parent / "strategy" / "children.py"
    command = [sys.executable, "-c", SCRIPT.format(body=body), str(file), child]
    start = time.monotonic()
    done = subprocess.run(command, text=True, capture_output=True, timeout=PATIENCE_S)
    assert time.monotonic() - start < SOON_S
    assert done.returncode == exit_code, done.stderr
    assert words in done.stderr
    assert not psutil.pid_exists(int(done.stdout))
