"""Benchmarks the best simulated plans for some steps and keeps the fastest.

Before that, a step is recorded in the stages of each plan, on one rank, which finds cuts that cannot work. Every rank
still holds the whole module then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.engine.draws import Draws, set_aside
from lightning_pipeline.engine.in_order import InOrder
from lightning_pipeline.engine.microbatch import Microbatch, Structure
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.compiled import is_compiled
from lightning_pipeline.partition.microbatch import microbatches_of
from lightning_pipeline.partition.stage_config import resolve
from lightning_pipeline.planning.observing import Step, gradients_apart
from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.planning.restoring import left_as_it_was
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.pure_modules import KeyedCalls
from lightning_pipeline.recording.recorder import Recorder
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.runtime.transport import Transport

from .._lightning import LightningModule
from .measure import SeededStep
from .outputs import backward_of
from .schedule_choice import Schedules

_SEEDS = (0, 1, 2, 3)
"""A step that leaves out layers at random may skip a stage with one of them, and hardly with all."""

MOST = 4
"""Plans to try."""
NEAR = 0.15
"""A plan is tried if it is expected to be slower than the first one by no more than this share."""
BUDGET_S = 4.5
"""Seconds for all trials together, about."""
_MIN_STEPS, _MAX_STEPS = 3, 8
"""Timed steps of each plan."""
_WARM_UP = 2.5
"""Duration of a plan's first two steps, in steps: shapes are learnt in one, buffers allocated in the other."""


def choose_plan(
    ranked: Callable[[], Sequence[StagePlan]],
    times: Callable[[Sequence[StagePlan]], list[list[float]]],
    module: nn.Module,
    everybody: Callable[[Callable[[], Any]], Any],
    limit: float,
) -> StagePlan:
    """The plan to take. All ranks of the pipeline must call it.

    Args:
        ranked: computes the plans that are expected to be the best, on the first rank.
        times: measures seconds of steps of some plans (`TrialSteps.times`).
        everybody: returns on all ranks what a function returns on the first.
        limit: bytes of memory of a device.
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
    """Of some plans, the best first, those that may turn out the best, and can be tried.

    Args:
        limit: bytes of memory of a device; plans need room beside the whole module.
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
        elif not chosen:  # without the first one there is nothing to compare with
            break
    return chosen[:MOST]


def best_tried(plans: Sequence[StagePlan], times: Sequence[Sequence[float]]) -> StagePlan:
    """The plan that was the fastest, with its measured time; the first one of equally fast ones.

    Args:
        times: seconds of each plan's steps, without sums over replicas.
    """
    took = [median(own) + plan.reduction_seconds for plan, own in zip(plans, times, strict=True)]
    seconds = min(took)
    return replace(plans[took.index(seconds)], step_seconds=seconds, is_tried=True)


class TrialSteps:
    """Times training steps without an update, in the stages of some plans. Callers enter `without_side_effects`.

    Args:
        step: the user's, from a micro-batch to its loss.
        batch: of a step, on the first rank.
        schedules_of: gives the schedules of a plan.
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
        self._work = StepTask(
            kind=("tried", module.training),
            step=lambda state, microbatch: (None, step(microbatch)),
            loss_of=lambda state, loss: loss / state.num_microbatches,
            run_backward=run_backward,
            can_split=is_plain,
            seed=0,
        )

    def times(self, plans: Sequence[StagePlan]) -> list[list[float]]:
        """Seconds of at least three steps of each plan, on the slowest rank. Plans take turns, so that other load of
        the machine affects all of them. All ranks of the pipeline must call it."""
        with gradients_apart(self._module), ExitStack() as patched:
            tried = [self._pipeline(plan) for plan in plans]
            for pipeline in tried:
                patched.enter_context(pipeline.recorder.patched())
                self._seconds(pipeline)
            needed = sum(map(self._seconds, tried))
            count = max(_MIN_STEPS, min(_MAX_STEPS, int(BUDGET_S / needed - _WARM_UP)))  # the same on all ranks
            rounds = [[self._seconds(pipeline) for pipeline in tried] for _ in range(count)]
        return [list(times) for times in zip(*rounds, strict=True)]

    def _pipeline(self, plan: StagePlan) -> Pipeline:
        stages = resolve(self._module, plan.stage_config, plan.num_stages, has_virtual_stages=plan.has_virtual_stages)
        schedules = self._schedules_of(plan)
        transport = self._transport
        topology = transport.topology.along(schedules.placement)
        if topology != transport.topology:  # virtual stages may send to other ranks
            assert transport.store is not None
            transport = Transport.shared(
                topology, transport.requested_device, transport.timeout, transport.store, transport.notice
            )
        return Pipeline(
            rank=transport.stage,
            placement=schedules.placement,
            device=self._device,
            transport=transport,
            tensors=ModuleTensors(self._module, stages),
            calls=KeyedCalls(self._module, stages),
            holders=lambda number: range(plan.num_stages),
            schedule=schedules,
            num_microbatches=plan.num_microbatches,
        )

    def _seconds(self, pipeline: Pipeline) -> float:
        """Run one step; its time on the slowest rank."""
        microbatches = None
        if self._transport.stage == 0:
            own = tree.replace(self._batch, Tensor.clone)  # which the step may write into
            microbatches = microbatches_of(own, pipeline.num_microbatches, self._module)
        # A step updates buffers on the ranks where the plan has them, and the next plan has them on others.
        with left_as_it_was(self._module):
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
    """What goes wrong when the step is recorded in the plan's stages; empty if nothing does.

    Args:
        goes_back: whether the data may go back to an earlier stage.
    """
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
    except Exception as error:  # user code may fail in any way on placeholders
        return f"{type(error).__name__}: {error}"
    return f"no module runs on stage {min(set(range(num_stages)) - used)}"


def _recorded(module: LightningModule, plan: StagePlan, step: Step, microbatch: object, seed: int) -> Program:
    num_stages = len(plan.stages)
    stages = resolve(module, plan.stage_config, num_stages)
    tensors = ModuleTensors(module, stages)
    draws = Draws(module.device)
    recorder = Recorder(tensors, KeyedCalls(module, stages), range(num_stages))
    given, layout = tree.flatten(microbatch)
    state = Microbatch(0, Structure("trial", layout, []), layout, 1, 1.0, 1, True, 0)
    data = _OnOneRank(state, tensors, num_stages, draws)
    # A recording may leave placeholders on the module, such as a metric's sums, which the next one must not see.
    with left_as_it_was(module), torch.set_grad_enabled(module.training), draws.kept():
        recording = Recording(recorder, recorder.beginning("trial", 0), data, lambda number: draws.seed(seed, number))
        state.recording = recording
        with recorder.patched(), recorder.installed(), recording.running():
            step(tree.rebuild(layout, [tensor.clone() for tensor in given]))
    return Program(recording.event)


class _OnOneRank:
    """Gives a recording the values that its Python reads, computed from a module that is whole on this rank."""

    def __init__(self, state: Microbatch, tensors: ModuleTensors, num_stages: int, draws: Draws) -> None:
        self._tensors = tensors
        self._run = InOrder(
            state,
            (),
            [0] * num_stages,
            0,
            tensors,
            None,
            holders=lambda number: (0,),
            seed_draw=draws.seed,
            training=False,
            earlier=_no_earlier_microbatch,
        )

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


def _no_earlier_microbatch(recording: object, value: int) -> Tensor:
    raise AssertionError("a trial has one micro-batch")
