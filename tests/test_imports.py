"""What importing the package costs beyond Lightning: nothing but its own files."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.launching import PATIENCE_S

CODE = """
import json, sys
import lightning.pytorch
before = set(sys.modules)
from lightning_pipeline import PipelineStrategy, PipelineTimeline
print(json.dumps(sorted(set(sys.modules) - before)))
"""
LATER = ("hydra", "omegaconf", "torch.distributed.checkpoint", "torch._dynamo", "matplotlib", "PIL")


def test_what_takes_long_is_imported_on_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    found = json.loads(done.stdout)
    assert "lightning_pipeline.strategy.pipeline" in found
    assert [name for name in found if name.startswith(LATER)] == []
