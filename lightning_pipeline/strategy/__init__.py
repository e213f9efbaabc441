"""Lightning's side: the strategy, its clipping, logged values, metrics and checkpoints."""

from lightning_pipeline.strategy.pipeline import PipelineStrategy, register_strategies
from lightning_pipeline.strategy.timeline import PipelineTimeline

__all__ = ["PipelineStrategy", "PipelineTimeline"]

register_strategies()
