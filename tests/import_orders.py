"""Imports Lightning, by each of its names, and this package in each order that users may; run by test_registration.

One interpreter imports, once, what takes long: the libraries below Lightning. Each order is then tried in a fork of it,
in which neither of the two packages has been imported.

Usage: import_orders.py [all]; without `all`, what needs no import, and one order.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

ORDERS = ("import lightning_pipeline, lightning",)
MORE_ORDERS = (
    "import lightning, lightning_pipeline",
    "import lightning_pipeline, importlib.util as u; u.find_spec('lightning.pytorch'); import lightning",
    "from lightning_pipeline.strategy import PipelineStrategy; import lightning",
    "import lightning_pipeline; lightning_pipeline.PipelineStrategy; import lightning",
)
PYTORCH_LIGHTNING_ORDERS = (
    "import pytorch_lightning, lightning_pipeline",
    "import lightning_pipeline, pytorch_lightning",
    "import lightning, pytorch_lightning, lightning_pipeline",
    "import lightning_pipeline; lightning_pipeline.PipelineStrategy; import pytorch_lightning",
)
NAMES = {"pipeline", "pipeline_gpipe", "pipeline_1f1b"}
LATER = ("hydra", "omegaconf", "torch.distributed.checkpoint", "torch._dynamo", "matplotlib", "PIL")
"""What takes long, and is imported on first use."""


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


def registers(order: str, name: str = "lightning.pytorch") -> None:
    assert not {"lightning", "pytorch_lightning", "lightning_pipeline"} & set(sys.modules)
    exec(order)
    registry = import_module(name).strategies.StrategyRegistry
    assert set(registry.available_strategies()) >= NAMES, order
    takes(name, "pipeline_gpipe")
    import lightning_pipeline

    made = lightning_pipeline.PipelineStrategy(schedule="gpipe", num_stages=2, num_microbatches=6)
    for strategy in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        taken = takes(name, strategy)
        again = pickle.loads(pickle.dumps(taken))
        assert taken is strategy and type(again) is type(taken)
        assert taken.num_microbatches == again.num_microbatches == 6


def takes(name: str, strategy: Any) -> Any:
    """The strategy of a Trainer of that name, which has to be one of that name's own."""
    pytorch = import_module(name)
    taken = pytorch.Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False).strategy
    assert taken.schedule == "gpipe"
    assert pytorch.strategies.ParallelStrategy in type(taken).__mro__, type(taken).__mro__
    return taken


def registers_where_only_one_is_installed(name: str, other: str) -> None:
    class Hiding:
        def find_spec(self, fullname: str, *_: Any) -> None:
            if fullname.partition(".")[0] == other:
                raise ModuleNotFoundError(fullname, name=fullname)

    import importlib.util

    found = importlib.util.find_spec
    importlib.util.find_spec = lambda wanted, *args: None if wanted == other else found(wanted, *args)
    sys.meta_path.insert(0, Hiding())  # type: ignore[arg-type]
    registers(f"import lightning_pipeline, {name}; lightning_pipeline.PipelineTimeline", name)
    from lightning_pipeline.strategy import PipelineStrategy

    assert PipelineStrategy is import_module("lightning_pipeline").PipelineStrategy


def both_take_each_others_strategies() -> None:
    import lightning.pytorch
    import pytorch_lightning

    import lightning_pipeline
    import lightning_pipeline.pytorch_lightning as for_pytorch_lightning

    for made_by in (lightning_pipeline, for_pytorch_lightning):
        for name in ("lightning.pytorch", "pytorch_lightning"):
            takes(name, made_by.PipelineStrategy(schedule="gpipe"))
            takes(name, "pipeline_gpipe")
    assert issubclass(for_pytorch_lightning.PipelineTimeline, pytorch_lightning.Callback)
    assert issubclass(lightning_pipeline.PipelineTimeline, lightning.pytorch.Callback)

    class Own(lightning_pipeline.PipelineStrategy):
        pass

    takes("lightning.pytorch", Own(schedule="gpipe"))
    try:
        takes("pytorch_lightning", Own(schedule="gpipe"))
    except TypeError as error:
        assert "derive it from lightning_pipeline.pytorch_lightning" in str(error), error
    else:
        raise AssertionError("a class of the user's was taken for another")


def needs_no_import() -> None:
    """Torch imports this package by its entry point, while Lightning is being imported. All that the package then costs
    are its own files."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    assert "torch" not in sys.modules
    import lightning.pytorch

    assert "lightning_pipeline" in sys.modules, "pip install -e . makes the entry point known"
    assert "lightning_pipeline.strategy" not in sys.modules
    before = set(sys.modules)
    from lightning_pipeline import PipelineStrategy, PipelineTimeline  # noqa: F401

    found = set(sys.modules) - before
    assert "lightning_pipeline.strategy.pipeline" in found
    assert sorted(name for name in found if name.startswith(LATER)) == []
    takes("lightning.pytorch", "pipeline_gpipe")
    assert "npu" in lightning.pytorch.accelerators.AcceleratorRegistry


def fabric_is_told_what_to_use() -> None:
    import lightning

    import lightning_pipeline

    for strategy in ("pipeline", lightning_pipeline.PipelineStrategy(num_stages=2)):
        try:
            lightning.Fabric(strategy=strategy, devices=2, accelerator="cpu")
        except TypeError as error:
            assert 'use Trainer(strategy="pipeline")' in str(error), error
        else:
            raise AssertionError("Fabric took a strategy that has no loop for it")
    takes("lightning.pytorch", "pipeline_gpipe")


def every_module_can_be_walked() -> None:
    """Also those that exist once more by other names, and not for ever."""
    import pkgutil

    import lightning_pipeline

    names = [module.name for module in pkgutil.walk_packages(lightning_pipeline.__path__, "lightning_pipeline.")]
    assert len(names) == len(set(names)) < 1000
    assert "lightning_pipeline.pytorch_lightning.strategy.pipeline" in names


def works_with_both_imported() -> None:
    both_take_each_others_strategies()
    fabric_is_told_what_to_use()
    every_module_can_be_walked()


if __name__ == "__main__":
    passed = [in_a_fork(imports_neither_torch_nor_lightning), in_a_fork(needs_no_import)]
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch._dynamo  # noqa: F401
    import torchmetrics  # noqa: F401

    passed += [in_a_fork(registers, order) for order in ORDERS]
    if "all" in sys.argv:
        passed += [in_a_fork(registers, order) for order in MORE_ORDERS]
        passed += [in_a_fork(registers, order, "pytorch_lightning") for order in PYTORCH_LIGHTNING_ORDERS]
        passed.append(in_a_fork(works_with_both_imported))
        passed.append(in_a_fork(registers_where_only_one_is_installed, "pytorch_lightning", "lightning"))
        passed.append(in_a_fork(registers_where_only_one_is_installed, "lightning.pytorch", "pytorch_lightning"))
    sys.exit(not all(passed))
