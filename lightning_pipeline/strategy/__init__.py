"""The Lightning side: strategy, callbacks, logged values, launchers."""

from lightning_pipeline._registration import introduce, register
from lightning_pipeline.engine.reducer import PipelineGradReducer

from .lightning_private import let_modules_be_compiled, say_which_import
from .pipeline import PipelineStrategy
from .rebalance import PipelineRebalance
from .shared_parameters import sync_pipeline_shared_parameters
from .timeline import PipelineTimeline

__all__ = [
    "PipelineGradReducer",
    "PipelineRebalance",
    "PipelineStrategy",
    "PipelineTimeline",
    "sync_pipeline_shared_parameters",
]

register()
introduce(PipelineStrategy)
say_which_import()
let_modules_be_compiled()
