"""PipelineRebalance: a callback that says whether another cut would be faster."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.recorded_times import gather_spans
from lightning_pipeline.partition.batches import microbatches_of
from lightning_pipeline.planning.rebalance import Rebalance, rebalance
from lightning_pipeline.planning.timing import measured_speed
from lightning_pipeline.planning.tracing import DeviceSpeed
from lightning_pipeline.schedules import measured_costs, recorded_schedule

from .._lightning import Callback, LightningModule, Trainer, rank_zero_info
from .advisor import is_usual
from .measure import dtype_of, estimate_on_ranks, estimate_training_step, on_all_ranks, without_side_effects
from .pipeline import pipeline_of


class PipelineRebalance(Callback):
    """Records some training steps, and reports once which modules to move to other stages, and what that would save.

    It moves nothing: the report ends with the stage_config for the next run. The stages' times are measured, and so is
    how fast each rank is; how much of a stage's time each of its modules takes is estimated from their operations.

    Args:
        first_step: the optimizer step to start recording at, when the run has warmed up.
        num_steps: training steps to record.

    Raises:
        ValueError: a number below 1.
    """

    def __init__(self, first_step: int = 10, num_steps: int = 5) -> None:
        if first_step < 1 or num_steps < 1:
            raise ValueError(f"first_step and num_steps are numbers from 1, got {first_step} and {num_steps}")
        self.first_step = first_step
        self.num_steps = num_steps
        self.rebalance: Rebalance | None = None
        """The result; None until there is one."""
        self._steps: list[list[Span]] = []
        self._spans: list[Span] | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy = pipeline_of(trainer)
        self._spans = None
        is_due = trainer.global_step >= self.first_step and len(self._steps) < self.num_steps
        if strategy is not None and is_due:
            self._spans = []
            strategy.observers.add(self._spans.append)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = pipeline_of(trainer)
        if self._spans is None or strategy is None:
            return
        pipeline, transport = strategy.session.pipeline, strategy.session.transport
        strategy.observers.discard(self._spans.append)
        if is_usual(self._spans, pipeline):
            self._steps.append(self._spans)
        if len(self._steps) < self.num_steps or self.rebalance is not None or pipeline.num_ranks == 1:
            return
        assert transport is not None  # there are several stages
        with strategy.aside():  # the ranks exchange measurements, while only the first one computes
            device = strategy.root_device
            timelines = [gather_spans(spans, transport) for spans in self._steps]
            own_speed = torch.tensor(astuple(measured_speed(device, dtype_of(pl_module))), dtype=torch.float64)
            of_ranks = transport.all_gather_vector(own_speed, "how fast each rank is").tolist()

            def decide() -> Rebalance:
                schedule = recorded_schedule(timelines[-1], pipeline.placement)
                measured = measured_costs(timelines, pipeline.placement)
                microbatch = microbatches_of(batch, pipeline.num_microbatches, pl_module)[0]
                estimate = partial(estimate_training_step, pl_module, microbatch, device)
                with without_side_effects(pl_module, device):
                    costs, speeds = estimate_on_ranks(estimate, [DeviceSpeed(*figures) for figures in of_ranks])
                return rebalance(costs, pipeline.recorder.calls.stages.exact, measured, schedule, speeds=speeds)

            # Each pipeline decides by itself: replicas may see usual batches in different steps.
            self.rebalance = on_all_ranks(
                decide, lambda found: transport.broadcast_object(found, 0, "a better cut"), decides=pipeline.rank == 0
            )
        rank_zero_info(f"PipelineRebalance: {self.rebalance}")
