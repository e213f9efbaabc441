"""Runs the plans that are expected to be the best for some steps, and keeps the fastest.

Before that one rank records a step in the stages of each plan. Every rank still holds the whole module then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline.engine.draws import set_aside
from lightning_pipeline.engine.in_order import InOrder
from lightning_pipeline.engine.microbatch import Microbatch, Structure
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.engine.replica_collectives import World
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.batches import microbatches_of
from lightning_pipeline.partition.compiled import is_compiled
from lightning_pipeline.partition.stage_map import resolve
from lightning_pipeline.planning.observing import Step, gradients_apart, graphs_kept
from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.planning.restoring import left_as_it_was
from lightning_pipeline.recording.keyed_calls import KeyedCalls
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.runtime.transport import Transport

from .._lightning import LightningModule
from .measure import SeededStep, reached_by_trainer
from .own_backward import backward_of
from .schedule_choice import Schedules

_SEEDS = (0, 1, 2, 3)
"""A step that drops layers at random may skip a stage with one seed, but hardly with all."""

MOST = 4
"""Most plans to try."""
NEAR = 0.15
"""Plans are tried that are expected to be slower than the best by at most this share of a step."""
BUDGET_S = 4.5
"""For all trials together, roughly."""
_MIN_STEPS, _MAX_STEPS = 3, 8
"""Timed steps of each plan."""
_WARM_UP = 2.5
"""What a plan's first two steps take, in steps: one learns shapes, the other makes buffers."""


def choose_plan(
    ranked: Callable[[], Sequence[StagePlan]],
    times: Callable[[Sequence[StagePlan]], list[list[float]]],
    module: nn.Module,
    everybody: Callable[[Callable[[], Any]], Any],
    limit: float,
) -> StagePlan:
    """The plan to use. All ranks of the pipeline must call it.

    Args:
        ranked: gives plans on the first rank, those that are expected to be the best first.
        times: measures seconds of steps of some plans (`TrialSteps.times`).
        everybody: calls a function on the first rank, and gives all ranks its result.
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
    """Those of some plans, the best first, that may turn out the fastest and can be tried.

    Args:
        limit: bytes that a device has; plans need room next to the whole module.
    """
    # Compiling takes longer than all steps together.
    if not plans[0].is_measured or any(is_compiled(part) for part in module.modules()):
        return []
    whole = 2 * sum(parameter.nbytes for parameter in module.parameters())  # with gradients
    chosen: list[StagePlan] = []
    left = BUDGET_S
    for plan in plans:
        needed = plan.step_seconds * (_WARM_UP + _MIN_STEPS)
        is_near = plan.step_seconds <= plans[0].step_seconds * (1 + NEAR)
        if is_near and needed <= left and whole + max(plan.peak_bytes) <= limit:
            chosen.append(plan)
            left -= needed
        elif not chosen:  # without the first one there is nothing to compare the others with
            break
    return chosen[:MOST]


def best_tried(plans: Sequence[StagePlan], times: Sequence[Sequence[float]]) -> StagePlan:
    """The plan that ran fastest, with its measured time; on a tie the first one.

    Args:
        times: seconds of each plan's steps, without sums over replicas.
    """
    took = [median(own) + plan.reduction_seconds for plan, own in zip(plans, times, strict=True)]
    seconds = min(took)
    return replace(plans[took.index(seconds)], step_seconds=seconds, is_tried=True)


class _Tried(NamedTuple):
    """The stages of a plan.

    Attributes:
        holders: the ranks that hold a tensor of the module, by number; of others, all do.
    """

    pipeline: Pipeline
    tensors: ModuleTensors
    holders: dict[int, Sequence[int]]

    def settle(self) -> None:
        """After a first step: go on as if each rank held what it has used, as in training. Who writes into a tensor
        that others hold sends it to them."""
        placement = self.pipeline.placement
        for number, stages in enumerate(self.tensors.holders):
            if stages:
                self.holders[number] = sorted({placement[stage] for stage in stages})
        self.pipeline.note_release()


class TrialSteps:
    """Runs training steps without updates. The caller keeps them from leaving traces (`without_side_effects`)."""

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
        self._work = StepTask(
            kind=("tried", module.training),
            step=lambda state, microbatch: (None, step(microbatch)),
            loss_of=lambda state, loss: loss / state.num_microbatches,
            run_backward=run_backward,
            can_split=is_plain,
            seed=0,
        )

    def times(self, plans: Sequence[StagePlan]) -> list[list[float]]:
        """Seconds of steps of each plan on the slowest rank. The plans take turns, so that other load on the machine
        slows all of them. All ranks of the pipeline must call it."""
        with gradients_apart(self._module), ExitStack() as patched:
            if not getattr(self._module, "automatic_optimization", True):
                patched.enter_context(graphs_kept())
            tried = [self._pipeline(plan) for plan in plans]
            for one in tried:
                patched.enter_context(one.pipeline.recorder.patched())
                self._seconds(one.pipeline)
                one.settle()
            pipelines = [one.pipeline for one in tried]
            needed = sum(map(self._seconds, pipelines))
            # `needed` is the slowest rank's, so the count is the same on all.
            count = max(_MIN_STEPS, min(_MAX_STEPS, int(BUDGET_S / needed - _WARM_UP)))
            rounds = [[self._seconds(pipeline) for pipeline in pipelines] for _ in range(count)]
        return [list(times) for times in zip(*rounds, strict=True)]

    def _pipeline(self, plan: StagePlan) -> _Tried:
        stages = resolve(self._module, plan.stage_config, plan.num_stages, has_virtual_stages=plan.has_virtual_stages)
        schedules = self._schedules_of(plan)
        transport = self._transport
        topology = transport.topology.along(schedules.placement)
        if topology != transport.topology:  # virtual stages may send to other ranks
            assert transport.store is not None
            transport = Transport.shared(
                topology, transport.requested_device, transport.timeout, transport.store, transport.notice
            )
        holders: dict[int, Sequence[int]] = {}
        tensors = ModuleTensors(self._module, stages)
        shared = RankResources(
            transport.stage,
            schedules.placement,
            self._device,
            transport,
            tensors,
            KeyedCalls(self._module, stages),
            lambda number: holders.get(number, range(plan.num_stages)),
        )
        pipeline = Pipeline(
            shared,
            schedule=schedules,
            num_microbatches=plan.num_microbatches,
            world=World(topology),  # other replicas, which try plans at the same time, are taken to be like this one
        )
        return _Tried(pipeline, tensors, holders)

    def _seconds(self, pipeline: Pipeline) -> float:
        """Run one step; its time on the slowest rank."""
        microbatches = None
        if self._transport.stage == 0:
            own = tree.replace(self._batch, Tensor.clone)  # which the step may write into
            microbatches = microbatches_of(own, pipeline.num_microbatches, self._module)
        # A step writes into buffers on the ranks that this plan gives them, and the next plan gives them others.
        with left_as_it_was(self._module, reached_by_trainer(self._module)):
            self._synchronize()
            began = time.perf_counter()
            pipeline.run(self._work, microbatches)
            self._synchronize()
            took = time.perf_counter() - began
        found = torch.tensor([took], dtype=torch.float64)
        return float(self._transport.all_gather_vector(found, "a trial of a plan").max())

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()


def fault_of_cut(
    module: LightningModule, plan: StagePlan, step: Step, microbatch: object, *, goes_back: bool = False
) -> str:
    """What goes wrong when the step is recorded in the plan's stages; empty if nothing does."""
    num_stages = len(plan.stages)
    used: set[int] = set()
    try:
        for seed in _SEEDS:
            program = _recorded(module, plan, step, microbatch, seed)
            if len(program.visits) > num_stages and not goes_back:
                line = next(event.line for event in program.events if event.visit >= num_stages)
                return f"the data goes back to an earlier stage ({line})"
            holding = (event for event in program.events if any(type(v) is int and v < 0 for v in event.inputs))
            used.update(event.visit % num_stages for event in holding)
            if len(used) == num_stages:
                return ""
    except Exception as error:  # the user's code may fail on placeholders in any way
        return f"{type(error).__name__}: {error}"
    return f"no module runs on stage {min(set(range(num_stages)) - used)}"


def _recorded(module: LightningModule, plan: StagePlan, step: Step, microbatch: object, seed: int) -> Program:
    num_stages = len(plan.stages)
    stages = resolve(module, plan.stage_config, num_stages)
    tensors = ModuleTensors(module, stages)
    calls = KeyedCalls(module, stages)
    shared = RankResources(0, [0] * num_stages, module.device, None, tensors, calls, lambda number: (0,))
    recorder, draws = shared.recorder, shared.draws
    given, layout = tree.flatten(microbatch)
    state = Microbatch(0, Structure("trial", layout, []), layout, 1, 1.0, 1, True, 0)
    data = _OnOneRank(state, shared)
    # One recording must not leave anything on the module for the next, such as a metric's sums.
    with left_as_it_was(module, reached_by_trainer(module)), torch.set_grad_enabled(module.training), draws.kept():
        recording = Recording(recorder, recorder.beginning("trial", 0), data, lambda number: draws.seed(seed, number))
        state.recording = recording
        with recorder.patched(), recorder.installed(), recording.running():
            try:
                step(tree.rebuild(layout, [tensor.clone() for tensor in given]))
            finally:
                data.let_go()
    return Program(recording.event)


class _OnOneRank:
    """Gives a recording its data, from a module that is whole on this rank."""

    def __init__(self, state: Microbatch, shared: RankResources) -> None:
        self._tensors = shared.tensors
        self._run = InOrder(state, shared, [state], training=False)

    def let_go(self) -> None:
        """Free what was computed: views of buffers would count as the user's."""
        self._run.let_go()

    def read(self, recording: Recording, values: Sequence[int]) -> list[Tensor]:
        self.finish_before(recording, with_own=False)
        with set_aside():
            return self._run.data_of(values)

    def read_held(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.detach() for tensor in tensors]

    def finish_before(self, recording: Recording, *, with_own: bool) -> None:
        with set_aside():
            self._run.run_up_to(recording.event)

    def shown(self, recording: Recording, value: int, show: Callable[[Tensor], str]) -> str:
        [tensor] = self.read_held([self._tensors.tensors[-1 - value]]) if value < 0 else self.read(recording, [value])
        return show(tensor)
