"""`import lightning_pipeline` registers the strategies, however it is imported, and does not cost torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launching import PATIENCE_S


def test_names_are_registered_whatever_is_imported_first() -> None:
    script = str(Path(__file__).with_name("import_orders.py"))
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
