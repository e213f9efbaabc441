"""This package for programs that import `pytorch_lightning` where `lightning` is installed as well.

`lightning_pipeline.PipelineStrategy` and the other names come from here if the program has imported `pytorch_lightning`
and not `lightning`. A program that imports both takes them from here for a Trainer of `pytorch_lightning`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_pipeline
from lightning_pipeline._names import PYTORCH_LIGHTNING, names_of

if TYPE_CHECKING:
    from lightning_pipeline import *  # noqa: F403

__all__ = lightning_pipeline.__all__

# Imports the files of the package above a second time, under other names; but not again below those.
__path__ = [str(Path(__file__).parents[1])] if __name__ == PYTORCH_LIGHTNING.floor else []


def __getattr__(name: str) -> Any:
    if name in __all__:
        return names_of(PYTORCH_LIGHTNING.pytorch).public(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
