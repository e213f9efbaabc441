"""Pipeline-parallel training for PyTorch Lightning: `Trainer(strategy="pipeline")`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_pipeline._names import used
from lightning_pipeline._registration import register

if TYPE_CHECKING:
    from lightning_pipeline.accelerators.npu import NPUAccelerator
    from lightning_pipeline.strategy import (
        PipelineGradReducer,
        PipelineRebalance,
        PipelineStrategy,
        PipelineTimeline,
        sync_pipeline_shared_parameters,
    )

__all__ = [
    "NPUAccelerator",
    "PipelineGradReducer",
    "PipelineRebalance",
    "PipelineStrategy",
    "PipelineTimeline",
    "sync_pipeline_shared_parameters",
]

__version__: str

register()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lightning-pipeline")
    if name in __all__:
        return used().public(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
