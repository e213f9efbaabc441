"""Schedules need the standard library only."""

import subprocess
import sys


def test_torch_is_not_imported() -> None:
    program = (
        "import sys, lightning_pipeline.schedules; print(sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
