"""Which plan to take: the best by simulation run for some steps first, as a machine does more than is simulated.

All ranks still hold the whole module then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.compiled import is_compiled
from lightning_pipeline.partition.keyed_calls import KeyedCalls
from lightning_pipeline.partition.microbatch import microbatches_of
from lightning_pipeline.partition.module_tensors import ModuleTensors
from lightning_pipeline.partition.observed_run import gradients_apart
from lightning_pipeline.partition.plan import StagePlan
from lightning_pipeline.partition.stage_config import resolve
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.work import Work
from lightning_pipeline.strategy.losses import backward_of
from lightning_pipeline.strategy.measuring import SeededStep
from lightning_pipeline.strategy.schedule_choice import Schedules

MOST = 4
"""Plans to try."""
NEAR = 0.15
"""By which share of a step another plan may be expected to be slower than the first one, and be tried."""
BUDGET_S = 4.5
"""For all trials together, or so."""
_MIN_STEPS, _MAX_STEPS = 3, 8
"""Of each plan that count."""
_WARM_UP = 2.5
"""What a plan's first two steps take, in steps: shapes are learnt in one, buffers made in the other."""
LEAST = _WARM_UP + _MIN_STEPS
"""What trying a plan takes at least, in steps."""


def choose_plan(
    ranked: Callable[[], Sequence[StagePlan]],
    times: Callable[[Sequence[StagePlan]], list[list[float]]],
    module: nn.Module,
    everybody: Callable[[Callable[[], Any]], Any],
    limit: float,
) -> StagePlan:
    """The plan to take. All ranks of the pipeline must call it.

    Args:
        ranked: on the first rank, the plans that are expected to be the best.
        times: seconds of steps of some plans (`TrialSteps.times`).
        everybody: gives all ranks what the first one makes of a function.
        limit: bytes that a device has.
    """

    def worth() -> tuple[StagePlan, list[StagePlan]]:
        plans = ranked()
        return plans[0], worth_trying(module, plans, limit)

    first, plans = everybody(worth)
    if not plans:
        return first
    took = times(plans)
    return everybody(lambda: best_tried(plans, took))


def worth_trying(module: nn.Module, plans: Sequence[StagePlan], limit: float) -> list[StagePlan]:
    """Those of some plans, the best first, that may be the best, and can be tried.

    Args:
        limit: bytes that a device has; plans need room beside the whole module.
    """
    if not plans[0].is_measured:
        return []
    if any(is_compiled(part) for part in module.modules()):  # a compiler takes longer than all steps together
        return []
    whole = 2 * sum(parameter.nbytes for parameter in module.parameters())  # with gradients
    chosen: list[StagePlan] = []
    left = BUDGET_S
    for plan in plans:
        needed = plan.step_seconds * LEAST
        is_near = plan.step_seconds <= plans[0].step_seconds * (1 + NEAR)
        if is_near and needed <= left and whole + max(plan.peak_bytes) <= limit:
            chosen.append(plan)
            left -= needed
        elif not chosen:  # others say nothing without the first one
            break
    return chosen[:MOST]


def best_tried(plans: Sequence[StagePlan], times: Sequence[Sequence[float]]) -> StagePlan:
    """The plan that was the fastest, as it was when it was tried; the first one of those that were.

    Args:
        times: seconds of each plan's steps, which took turns with those of the others, without sums over replicas.
    """
    took = [median(own) + plan.reduction_seconds for plan, own in zip(plans, times, strict=True)]
    seconds = min(took)
    return replace(plans[took.index(seconds)], step_seconds=seconds, is_tried=True)


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

    def times(self, plans: Sequence[StagePlan]) -> list[list[float]]:
        """Seconds of steps of each plan, the slowest rank's. The plans take turns, so that what else the machine does
        meets all of them; three in any case, and more in the time that there is. All ranks of the pipeline must call
        it."""
        with gradients_apart(self._module):
            tried = [self._pipeline(plan) for plan in plans]
            for pipeline in tried:
                self._seconds(pipeline)
            needed = sum(map(self._seconds, tried))
            count = max(_MIN_STEPS, min(_MAX_STEPS, int(BUDGET_S / needed - _WARM_UP)))  # the same on all ranks
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
