"""Schedules need the standard library only."""

import subprocess
import sys

from tests.launching import PATIENCE_S


def test_torch_is_not_imported() -> None:
    program = (
        "import sys, lightning_pipeline.schedules; print(sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == "[]"
