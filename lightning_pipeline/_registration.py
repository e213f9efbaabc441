"""Registers the strategies with Lightning as soon as Lightning is there, by each of its names.

`import lightning_pipeline.schedules` has to work, and be quick, where neither torch nor Lightning is installed. So
this package does not import Lightning: where it is already imported the names are registered at once, else when it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_pipeline._names import LIGHTNING, PYTORCH_LIGHTNING, Names, installed


def register() -> None:
    """Make `strategy="pipeline"` and its relatives known to the Trainer, now or when Lightning is imported."""
    waiting = []
    for names in (LIGHTNING, PYTORCH_LIGHTNING):
        if hasattr(sys.modules.get(names.pytorch), "Trainer"):
            _register_now(names)
        else:
            waiting.append(names)
    if waiting and not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported(waiting))


def _register_now(names: Names) -> None:
    # It registers as its last act, also where it is what imports Lightning.
    import_module(f"{next(one.floor for one in installed() if one.pytorch == names.pytorch)}.strategy")


_introduced: list[tuple[Any, Any, Any]] = []


def introduce(strategy: type, base: type, accelerator: type) -> None:
    """Let Trainers of both names take strategies that were made for the other: these become their own (`adopted_by`).

    Args:
        strategy: the one for a name, with that name's `base` of strategies and of accelerators.
    """
    for other, others_base, _ in _introduced:
        others_base.register(strategy)
        base.register(other)  # type: ignore[attr-defined]
    _introduced.append((strategy, base, accelerator))


def is_pipeline(strategy: object) -> bool:
    """Whether a strategy is a PipelineStrategy, for whichever name."""
    return isinstance(strategy, tuple(each for each, *_ in _introduced))


def adopted_by(strategy: type, accelerator: Any) -> Any:
    """The strategy in whose place one is, once a Trainer gives it an accelerator; None where it stays what it is.

    Raises:
        TypeError: it is a class of the user's, made for the other name.
    """
    for other, _, kind in _introduced:
        if isinstance(accelerator, kind) and not issubclass(strategy, other):
            if strategy not in [each for each, *_ in _introduced]:
                raise TypeError(
                    f"{strategy.__name__} was made for a Trainer of another name: derive it from {other.__module__}."
                    f"{other.__name__}, or take the Trainer and the module from the package that it is made for"
                )
            return other
    return None


class _WhenImported(MetaPathFinder):
    """Finds Lightning as usual, and registers the strategies once it has been executed."""

    def __init__(self, waiting: list[Names]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names = next((one for one in self._waiting if one.pytorch == fullname), None)
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
        loader = spec.loader
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            if names in self._waiting:  # and not before: who asks for a spec need not import
                self._waiting.remove(names)
            execute(module)
            _register_now(names)

        loader.exec_module = execute_and_register
        return spec
