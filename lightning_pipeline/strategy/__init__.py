"""Lightning's side: the strategy, its clipping, logged values, metrics and checkpoints."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipeline.accelerators.registration import register_npu
from lightning_pipeline.runtime.reducer import PipelineGradReducer
from lightning_pipeline.strategy.pipeline import PipelineStrategy, sync_pipeline_shared_parameters
from lightning_pipeline.strategy.rebalance import PipelineRebalance
from lightning_pipeline.strategy.timeline import PipelineTimeline

__all__ = [
    "PipelineGradReducer",
    "PipelineRebalance",
    "PipelineStrategy",
    "PipelineTimeline",
    "sync_pipeline_shared_parameters",
]

PipelineStrategy.register_strategies(StrategyRegistry)
register_npu()
