"""Plans tried by real steps on the ranks they are for: a simulation does not know all that a machine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.compiled import is_compiled
from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.microbatch import microbatches_of
from lightning_pipeline.partition.observed_run import gradients_apart
from lightning_pipeline.partition.plan import WORTH, StagePlan
from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.stage_config import resolve
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.work import Work
from lightning_pipeline.strategy.measuring import SeededStep
from lightning_pipeline.strategy.schedule_choice import Schedules
from lightning_pipeline.strategy.steps import backward_of

MOST = 3
"""Plans to try."""
NEAR = 0.15
"""By which share of a step another plan may be expected to be slower than the first one, and be tried."""
BUDGET_S = 4.5
"""For all trials together, or so."""
_MIN_STEPS, _MAX_STEPS = 3, 8
"""Of each plan that count."""
_WARM_UP = 2.5
"""What a plan's first two steps take, in steps: shapes are learnt in one, buffers made in the other."""
_LEAST = _WARM_UP + _MIN_STEPS
_SURE = 1.0
"""Standard errors by which another plan has to be faster than the first one: where there is more doubt they are alike,
and the first one is cut at larger modules."""


def worth_trying(
    module: LightningModule, plans: Sequence[StagePlan], budget: float, limit: float
) -> list[StagePlan]:
    """Those of some plans, the best first, that may be the best, and can be tried.

    Args:
        budget: seconds that trials may take.
        limit: bytes that a device has; plans need room beside the whole module.
    """
    if not plans[0].is_measured:
        return []
    if any(is_compiled(part) for part in module.modules()):  # a compiler takes longer than all steps together
        return []
    whole = 2 * sum(parameter.nbytes for parameter in module.parameters())  # with gradients
    chosen: list[StagePlan] = []
    left = budget
    for plan in plans:
        needed = plan.step_seconds * _LEAST
        is_near = plan.step_seconds <= plans[0].step_seconds * (1 + NEAR)
        if is_near and needed <= left and whole + max(plan.peak_bytes) <= limit:
            chosen.append(plan)
            left -= needed
        elif not chosen:  # others say nothing without the first one
            break
    return chosen[:MOST]


def best_tried(plans: Sequence[StagePlan], times: Sequence[Sequence[float]]) -> StagePlan:
    """The first plan, or the fastest of those that were faster by more than chance; as it was when it was tried.

    Args:
        times: seconds of each plan's steps, which took turns with those of the others, without sums over replicas.
    """
    times = [[own + plan.reduction_seconds for own in took] for plan, took in zip(plans, times, strict=True)]
    surely = [number for number in range(1, len(plans)) if _is_faster(times[number], times[0])]
    best = min(surely, key=lambda number: median(times[number]), default=0)
    plan, seconds = plans[best], median(times[best])
    busy = (1 - plan.bubble) * plan.step_seconds
    return replace(plan, step_seconds=seconds, bubble=max(0.0, 1 - busy / seconds), is_tried=True)


def _is_faster(times: Sequence[float], others: Sequence[float]) -> bool:
    gains = [other - own for own, other in zip(times, others, strict=True)]
    return fmean(gains) > _SURE * stdev(gains) / sqrt(len(gains))


def _once(plans: Sequence[StagePlan]) -> list[StagePlan]:
    """The first of those that are cut the same, for the same schedule."""
    found: dict[Hashable, StagePlan] = {}
    for plan in plans:
        found.setdefault((plan.schedule, plan.num_microbatches, *plan.stage_config), plan)
    return list(found.values())


class Trials:
    """Runs steps in the stages of plans, on ranks that all still hold the whole module.

    Args:
        step: the user's, from a micro-batch to its loss.
        batch: of a step, on the first rank.
        schedules_of: the schedules of a plan.
        everybody: what the first rank makes of a function, on all ranks.
        limit: bytes that a device has.
    """

    def __init__(
        self,
        module: LightningModule,
        step: SeededStep,
        batch: Any,
        transport: Transport,
        device: torch.device,
        *,
        schedules_of: Callable[[StagePlan], Schedules],
        everybody: Callable[[Callable[[], Any]], Any],
        limit: float,
    ) -> None:
        self._module = module
        self._step = step
        self._batch = batch
        self._transport = transport
        self._device = device
        self._schedules_of = schedules_of
        self._everybody = everybody
        self._limit = limit

    def best(self, ranked: Callable[[float], Sequence[StagePlan]], *, share_cores: bool) -> StagePlan:
        """The plan to take. All ranks of the pipeline must call it.

        Where ranks share cores, what it costs them to take turns comes first: how much longer than simulated the steps
        of a plan take, in which nearly all work is done in turns. The plans are then made once more.

        Args:
            ranked: on the first rank, plans that are expected to be the best, where turns cost so much (`simulate`).
        """

        def worth(turns: float, budget: float, *others: StagePlan) -> tuple[StagePlan, list[StagePlan]]:
            first, *more = ranked(turns)
            return first, worth_trying(self._module, _once([first, *others, *more]), budget, self._limit)

        budget = BUDGET_S
        first, plans = self._everybody(lambda: worth(1.0, budget))
        if plans and share_cores:
            took = self.times(plans[:1], 0.0)
            tried = self._everybody(lambda: best_tried(plans[:1], took))
            turns = max(1.0, median(took[0]) / (first.step_seconds - first.reduction_seconds))
            budget -= median(took[0]) * _LEAST
            first, plans = self._everybody(lambda: worth(turns, budget, tried))
            if not plans and tried.step_seconds * (1 - WORTH) < first.step_seconds:
                return tried
        if not plans:
            return first
        times = self.times(plans, budget)
        return self._everybody(lambda: best_tried(plans, times))

    def times(self, plans: Sequence[StagePlan], budget: float) -> list[list[float]]:
        """Seconds of steps of each plan, the slowest rank's. The plans take turns, so that what else the machine does
        meets all of them."""
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
            transport=self._transport,
            interception=Interception(self._module, stages, Streams(self._device)),
            schedule=schedules,
            num_microbatches=plan.num_microbatches,
        )

    def _seconds(self, pipeline: Pipeline) -> float:
        """Of one step."""
        run_backward, is_plain = backward_of(self._module)
        work = Work(
            kind=("tried", self._module.training),
            step=lambda state, microbatch: self._step(microbatch),
            loss_of=lambda state, loss: loss / state.num_microbatches,
            run_backward=run_backward,
            can_split=is_plain,
            seed=0,
        )
        microbatches = None
        if self._transport.stage == 0:
            own = tree.replace(self._batch, Tensor.clone)  # which the step may write into
            microbatches = microbatches_of(own, pipeline.num_microbatches, self._module)
        self._synchronize()
        began = time.perf_counter()
        report = pipeline.run(work, microbatches)
        self._synchronize()
        found = torch.tensor([time.perf_counter() - began, pipeline.is_new(report)], dtype=torch.float64)
        times, news = self._transport.all_gather_vector(found, "a trial of a plan").T
        if news.any():
            pipeline.settle(report, pipeline.all_reports(report))
        return float(times.max())

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()
