"""The notebook among the examples runs from start to end in a kernel of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

nbclient = pytest.importorskip("nbclient", reason="it runs notebooks")
nbformat = pytest.importorskip("nbformat", reason="it reads notebooks")
NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart.ipynb"
REFUSED = """
try:
    train(strategy="pipeline", devices=2)
except RuntimeError as error:
    print("told:", error)
"""


def test_the_quickstart_draws_a_picture_and_comes_to_the_bits_of_one_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(REFUSED))
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "loss after two epochs on two stages" in text
    assert "the weights are the same" in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "told: 2 processes are started by running the script again" in text
    assert 'use strategy="pipeline_notebook"' in text
