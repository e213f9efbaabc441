"""`import lightning_pipeline` registers the strategies, however it is imported, and does not cost torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

NAMES = "{'pipeline', 'pipeline_gpipe', 'pipeline_1f1b'}"


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning, lightning_pipeline",
        "import lightning_pipeline, lightning",
        "from lightning_pipeline.strategy import PipelineStrategy; import lightning",
    ],
    ids=["after", "before", "strategy"],
)
def test_names_are_registered(imports: str) -> None:
    code = f"""
{imports}
from lightning.pytorch.strategies import StrategyRegistry
assert {NAMES} <= set(StrategyRegistry.available_strategies()), StrategyRegistry.available_strategies()
trainer = lightning.pytorch.Trainer(strategy="pipeline_gpipe", devices=2, accelerator="cpu", logger=False)
assert type(trainer.strategy).__name__ == "PipelineStrategy" and trainer.strategy.schedule == "gpipe"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_the_package_itself_imports_neither_torch_nor_lightning() -> None:
    code = """
import lightning_pipeline, sys
assert not {"torch", "lightning"} & set(sys.modules)
lightning_pipeline.PipelineStrategy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
