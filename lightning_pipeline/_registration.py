"""Registers the strategies and the accelerator under both names of Lightning, without importing either.

`import lightning_pipeline.schedules` has to work, and be quick, where neither torch nor Lightning is installed. Every
`import torch` imports this package (its entry point is in the group `torch.backends`, so that
``Trainer(strategy="pipeline")`` needs no import). So the classes are imported only when a Trainer asks for them.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_pipeline._names import LIGHTNING, PYTORCH_LIGHTNING, Names, installed, names_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

REGISTERED: dict[str, dict[str, str]] = {
    "pipeline": {},
    "pipeline_gpipe": {"schedule": "gpipe"},
    "pipeline_1f1b": {"schedule": "1f1b"},
    "pipeline_interleaved": {"schedule": "interleaved_1f1b"},
    "pipeline_notebook": {"start_method": "fork"},
}
"""Names for `Trainer(strategy=...)`, with their options."""


def register() -> None:
    """Register the names with Lightning, now or when it is imported. Calling it again does nothing."""
    waiting = [names for names in (LIGHTNING, PYTORCH_LIGHTNING) if not _register_with(names)]
    if waiting and not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported(waiting))


def _register_with(names: Names) -> bool:
    """Register, if Lightning is imported. Returns whether it is."""
    if not hasattr(sys.modules.get(_connector(names)), "_AcceleratorConnector"):
        return False
    strategies, accelerators = (sys.modules[f"{names.pytorch}.{one}"] for one in ("strategies", "accelerators"))
    fabrics = sys.modules[f"{names.fabric}.strategies"]
    for name, options in REGISTERED.items():
        if name not in strategies.StrategyRegistry:
            make = partial(_make, names, "strategy.pipeline", "made_by_name")
            strategies.StrategyRegistry.register(name, make, description="Pipeline parallelism", **options)
            fabrics.STRATEGY_REGISTRY.register(name, refuse_fabric, override=True)
    if "npu" not in accelerators.AcceleratorRegistry:
        accelerators.AcceleratorRegistry.register("npu", _NPU(names), description="Ascend NPUs", required=True)
        make = partial(_make, names, "accelerators.single_npu", "SingleNPUStrategy")
        strategies.StrategyRegistry.register("single_npu", make, description="One Ascend NPU")
    import_module("lightning_pipeline.accelerators.availability").read_files_of_npus()
    for strategy in _introduced:
        _vouch_for(strategy)
    return True


def _connector(names: Names) -> str:
    """A module that is imported with any Trainer, after the registries."""
    return f"{names.pytorch}.trainer.connectors.accelerator_connector"


def _make(names: Names, module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(import_module(f"{names_of(names.pytorch).floor}.{module}"), name)(*args, **kwargs)


class _NPU:
    """The accelerator in Lightning's registry, not imported yet."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def __call__(self, **options: Any) -> Any:
        return _make(self._names, "accelerators.single_npu", "NPUAccelerator", **options)

    @staticmethod
    def is_available() -> bool:
        from lightning_pipeline.accelerators.availability import why_unavailable

        return why_unavailable() is None


_introduced: list[Any] = []


def introduce(strategy: type) -> None:
    """Let Trainers of both names take a PipelineStrategy that was made for one; it becomes their own (`adopted_by`)."""
    _introduced.append(strategy)
    _vouch_for(strategy)


def _vouch_for(strategy: Any) -> None:
    for names in (LIGHTNING, PYTORCH_LIGHTNING):
        for package, base in ((names.pytorch, "ParallelStrategy"), (names.fabric, "Strategy")):
            found = getattr(sys.modules.get(f"{package}.strategies"), base, None)
            if found is not None:
                found.register(strategy)


def is_pipeline(strategy: object) -> bool:
    """Whether a strategy is a PipelineStrategy of either name."""
    return isinstance(strategy, tuple(_introduced))


def adopted_by(strategy: type, accelerator: Any) -> Any:
    """The class that a strategy has to change to when a Trainer gives it an accelerator; None if it fits.

    Raises:
        TypeError: the strategy is a class of the user's for the other name.
    """
    if accelerator is None:
        return None
    for names in installed():
        kind = getattr(sys.modules.get(f"{names.pytorch}.accelerators"), "Accelerator", None)
        if kind is not None and isinstance(accelerator, kind):
            own = names.public("PipelineStrategy")
            if issubclass(strategy, own):
                return None
            if strategy in _introduced:
                return own
            raise TypeError(
                f"{strategy.__name__} was made for a Trainer of another name: derive it from {own.__module__}."
                f"{own.__name__}, or take the Trainer and the module from the package that it is made for"
            )
    return None


_NO_FABRIC = (
    "Fabric leaves forward and backward to a loop of yours, and a pipeline runs both for many micro-batches at a time: "
    "put the loop's body into a LightningModule's training_step and use Trainer(strategy=\"pipeline\")"
)


def refuse_fabric(**options: Any) -> NoReturn:
    """Raise where Fabric is given a pipeline's strategy or name, with what to use instead."""
    raise TypeError(_NO_FABRIC)


class _WhenImported:
    """An import hook that finds Lightning as usual, and registers with it once it has been executed."""

    def __init__(self, waiting: list[Names]) -> None:
        self._waiting = {_connector(names): names for names in waiting}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names = self._waiting.get(fullname)
        if names is None:
            return None
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                break
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register_with(names)
            self._waiting.pop(fullname, None)  # not before: a caller may ask for a spec without importing

        spec.loader.exec_module = execute_and_register
        return spec
