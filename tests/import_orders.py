"""Imports Lightning and this package in each order that users may; run by test_registration.

One interpreter imports, once, what takes long: the libraries below Lightning. Each order is then tried in a fork of it,
in which neither of the two packages has been imported.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

ORDERS = (
    "import lightning, lightning_pipeline",
    "import lightning_pipeline, lightning",
    "from lightning_pipeline.strategy import PipelineStrategy; import lightning",
    "import lightning_pipeline; lightning_pipeline.PipelineStrategy; import lightning",
)
NAMES = {"pipeline", "pipeline_gpipe", "pipeline_1f1b"}


def in_a_fork(check: Callable[..., None], *args: str) -> bool:
    """Whether `check(*args)` passed; else its traceback is on stderr."""
    child = os.fork()
    if child == 0:
        try:
            check(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def imports_neither_torch_nor_lightning() -> None:
    import lightning_pipeline  # noqa: F401

    assert not {"torch", "lightning"} & set(sys.modules)


def registers(order: str) -> None:
    assert not {"lightning", "lightning_pipeline"} & set(sys.modules)
    exec(order)
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import StrategyRegistry

    assert set(StrategyRegistry.available_strategies()) >= NAMES, StrategyRegistry.available_strategies()
    strategy = Trainer(strategy="pipeline_gpipe", devices=2, accelerator="cpu", logger=False).strategy
    assert (type(strategy).__name__, strategy.schedule) == ("PipelineStrategy", "gpipe")


if __name__ == "__main__":
    passed = [in_a_fork(imports_neither_torch_nor_lightning)]
    import torch._dynamo  # noqa: F401
    import torchmetrics  # noqa: F401

    passed += [in_a_fork(registers, order) for order in ORDERS]
    sys.exit(not all(passed))
