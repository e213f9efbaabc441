"""Steps in the stages of plans, before one of them is taken, on ranks that all still hold the whole module."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.keyed_calls import KeyedCalls
from lightning_pipeline.partition.microbatch import microbatches_of
from lightning_pipeline.partition.module_tensors import ModuleTensors
from lightning_pipeline.partition.observed_run import gradients_apart
from lightning_pipeline.partition.plan import StagePlan
from lightning_pipeline.partition.stage_config import resolve
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.work import Work
from lightning_pipeline.strategy.measuring import SeededStep
from lightning_pipeline.strategy.schedule_choice import Schedules
from lightning_pipeline.strategy.steps import backward_of

_MIN_STEPS, _MAX_STEPS = 3, 8
"""Of each plan that count."""
_WARM_UP = 2.5
"""What a plan's first two steps take, in steps: shapes are learnt in one, buffers made in the other."""
LEAST = _WARM_UP + _MIN_STEPS
"""What trying a plan takes at least, in steps."""


class TrialSteps:
    """Runs a training step without an update, and without a trace (`unnoticed`, as its user sees to).

    Args:
        step: the user's, from a micro-batch to its loss.
        batch: of a step, on the first rank.
        schedules_of: the schedules of a plan.
    """

    def __init__(
        self,
        module: LightningModule,
        step: SeededStep,
        batch: Any,
        transport: Transport,
        device: torch.device,
        schedules_of: Callable[[StagePlan], Schedules],
    ) -> None:
        self._module = module
        self._batch = batch
        self._transport = transport
        self._device = device
        self._schedules_of = schedules_of
        run_backward, is_plain = backward_of(module)
        self._work = Work(
            kind=("tried", module.training),
            step=lambda state, microbatch: (None, step(microbatch)),
            loss_of=lambda state, loss: loss / state.num_microbatches,
            run_backward=run_backward,
            can_split=is_plain,
            seed=0,
        )

    def times(self, plans: Sequence[StagePlan], budget: float) -> list[list[float]]:
        """Seconds of steps of each plan, the slowest rank's. The plans take turns, so that what else the machine does
        meets all of them. All ranks of the pipeline must call it.

        Args:
            budget: seconds that all of it may take; three steps of each plan run in any case.
        """
        with gradients_apart(self._module):
            tried = [self._pipeline(plan) for plan in plans]
            for pipeline in tried:
                self._seconds(pipeline)
            needed = sum(map(self._seconds, tried))
            count = max(_MIN_STEPS, min(_MAX_STEPS, int(budget / needed - _WARM_UP)))  # the same on all ranks
            rounds = [[self._seconds(pipeline) for pipeline in tried] for _ in range(count)]
        return [list(times) for times in zip(*rounds, strict=True)]

    def _pipeline(self, plan: StagePlan) -> Pipeline:
        stages = resolve(self._module, plan.stage_config, plan.num_stages, has_virtual_stages=plan.has_virtual_stages)
        schedules = self._schedules_of(plan)
        return Pipeline(
            rank=self._transport.stage,
            placement=schedules.placement,
            device=self._device,
            transport=self._transport_along(schedules.placement),
            tensors=ModuleTensors(self._module, stages),
            calls=KeyedCalls(self._module, stages),
            holders=lambda number: range(plan.num_stages),
            schedule=schedules,
            num_microbatches=plan.num_microbatches,
        )

    def _transport_along(self, placement: Sequence[int]) -> Transport:
        """The one that the pipeline would have: virtual stages send to ranks that others do not."""
        own = self._transport
        topology = own.topology.along(placement)
        if topology == own.topology:
            return own
        assert own.store is not None
        return Transport.shared(topology, own.requested_device, own.timeout, own.store, own.notice)

    def _seconds(self, pipeline: Pipeline) -> float:
        """Of one step."""
        microbatches = None
        if self._transport.stage == 0:
            own = tree.replace(self._batch, Tensor.clone)  # which the step may write into
            microbatches = microbatches_of(own, pipeline.num_microbatches, self._module)
        self._synchronize()
        began = time.perf_counter()
        pipeline.run(self._work, microbatches)
        self._synchronize()
        found = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        return float(self._transport.all_gather_vector(found, "a trial of a plan").max())

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()
