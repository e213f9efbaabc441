"""`import lightning_pipeline` registers the strategies, however it is imported.

It costs neither torch nor, beside Lightning, what takes long.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import PATIENCE_S


@pytest.mark.parametrize(
    "orders", [pytest.param((), id="often"), pytest.param(("all",), id="all", marks=pytest.mark.slow)]
)
def test_names_are_registered_whatever_is_imported_first(orders: tuple[str, ...]) -> None:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("import_orders.py")), *orders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
