"""Registers the strategies with Lightning as soon as Lightning is there.

`import lightning_pipeline.schedules` has to work, and be quick, where neither torch nor Lightning is installed. So
this package does not import Lightning: where it is already imported the names are registered at once, else when it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LIGHTNING = "lightning.pytorch"


def register() -> None:
    """Make `strategy="pipeline"` and its relatives known to the Trainer, now or when Lightning is imported."""
    module = sys.modules.get(_LIGHTNING)
    if module is not None and hasattr(module, "Trainer"):
        _register_now()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _register_now() -> None:
    import lightning_pipeline.strategy  # noqa: F401  registers as its last act, also where it is what imports Lightning


class _WhenImported(MetaPathFinder):
    """Finds Lightning as usual, and registers the strategies once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIGHTNING:
            return None
        sys.meta_path.remove(self)
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                break
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register_now()

        loader.exec_module = execute_and_register
        return spec
