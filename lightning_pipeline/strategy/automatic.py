"""stage_config="auto": all ranks measure the first step that comes, and rank 0 finds the best cut for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_pipeline.partition.costs import StepCosts, between
from lightning_pipeline.partition.microbatch import batch_size, microbatches_of
from lightning_pipeline.partition.observed_run import Step
from lightning_pipeline.partition.plan import EFFORT, StagePlan, plan_stages, ranked_plans
from lightning_pipeline.partition.plan_table import print_plan
from lightning_pipeline.runtime.executor import RECEIVES_AHEAD
from lightning_pipeline.runtime.link import measure_link
from lightning_pipeline.runtime.overhead import measure_overhead
from lightning_pipeline.runtime.transport import SEND_WINDOW, Transport
from lightning_pipeline.schedules import Schedule, ScheduleError
from lightning_pipeline.schedules.balance import Machine
from lightning_pipeline.strategy.cut_faults import fault_of_cut
from lightning_pipeline.strategy.dataloading import sample_batch
from lightning_pipeline.strategy.joint_measurement import described, of_all_ranks, restored, shared_cores
from lightning_pipeline.strategy.lightning_private import training_loader
from lightning_pipeline.strategy.measuring import SeededStep, estimate_training_step, loss_step, measure_step, unnoticed
from lightning_pipeline.strategy.optimizer_memory import bytes_with_state
from lightning_pipeline.strategy.plan_choice import choose_plan
from lightning_pipeline.strategy.schedule_choice import ScheduleChoice, Schedules
from lightning_pipeline.strategy.trial_steps import TrialSteps
from lightning_pipeline.strategy.with_everybody import with_everybody

_PLAN = "_automatic_plan"
_USABLE = 0.9
"""The share of a device's memory that parameters and activations may take; allocators and libraries take some, too."""

_FACTORS = (1, 2, 4, 8)
"""With num_microbatches="auto", micro-batches for each stage."""

_SLOWER = 8
"""How many times as long a search takes where ranks share cores: steps are longer to simulate, and there are two."""

_CONSIDERED = {1: ("1f1b", "zero_bubble"), 2: ("interleaved_1f1b", "interleaved_zero_bubble")}
"""With schedule="auto", by number of virtual stages; `Advisor` then chooses among all that have as many."""


class AutomaticCut:
    """Finds out, on the first step's batch, where to cut a module that nobody said it of.

    Until then every rank holds the whole module, so that the cut is free. A fit is cut by its first training step.

    Args:
        choice: what `schedule=` stands for.
        num_microbatches: of a step; "auto" chooses.
        device: of this rank.
    """

    def __init__(
        self,
        module: LightningModule,
        choice: ScheduleChoice,
        *,
        num_stages: int,
        num_microbatches: int | str,
        replicas: int,
        device: torch.device,
    ) -> None:
        self.is_cut = False
        """Whether evaluation steps can run, by a cut of their own, which the first training step replaces."""
        self._module = module
        self._choice = choice
        self._num_stages = num_stages
        self._device = device
        self._num_microbatches = num_microbatches
        self._machine = Machine(
            memory=_memory_of(device),
            replicas=replicas,
            cores=shared_cores(device, num_stages, num_stages * replicas // module.trainer.num_nodes),
            receives_ahead=RECEIVES_AHEAD,
            sends_underway=SEND_WINDOW if device.type == "cpu" else 1,
        )

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages on a rank, as far as that is known before there is a plan."""
        return self._choice.usual_virtual_stages

    def decide(
        self,
        name: str,
        arguments: tuple[Any, ...],
        context: Callable[[], AbstractContextManager[Any]],
        optimizers: Sequence[Optimizer],
        broadcast: Callable[[Any], Any],
        *,
        transport: Transport | None,
        is_first: bool,
    ) -> StagePlan:
        """The plan for a step, the same on all ranks, which must all call it. All measure, and rank 0 decides.

        Raises:
            ValueError: the step cannot be cut into as many stages, or no cut fits the memory.
        """
        batch, *others = arguments
        has_backward = name == "training_step"
        began = time.perf_counter()
        everybody = partial(with_everybody, broadcast=broadcast, decides=is_first)
        microbatches = restored(everybody(lambda: described(self._microbatches(batch))), self._device)
        step = loss_step(self._module, name, tuple(others), context, self._device)
        with unnoticed(self._module, self._device):
            costs = self._costs_on_all(name, step, microbatches, transport)

            def ranked(turns: float, most: int) -> list[StagePlan]:
                if isinstance(costs, Exception):
                    raise costs
                self._machine = replace(self._machine, turns=turns)
                return self._plans(costs, step, microbatches, optimizers, self._counts(batch), most)

            if has_backward and transport is not None:
                trial = TrialSteps(self._module, step, batch, transport, self._device, self._schedules_of)
                found = choose_plan(
                    ranked,
                    trial.times,
                    self._module,
                    everybody,
                    share_cores=self._machine.cores is not None,
                    limit=self._machine.limit(0),
                )
            else:
                found = everybody(lambda: ranked(1.0, 1)[0])
        self.is_cut = True
        if is_first:
            rank_zero_info(f'stage_config="auto" took {time.perf_counter() - began:.1f} s to find where to cut:')
            print_plan(found)
        return found

    def _costs_on_all(
        self,
        name: str,
        step: SeededStep,
        microbatches: Mapping[int, Any],
        transport: Transport | None,
    ) -> dict[int, StepCosts] | Exception:
        """What a micro-batch of each size costs, by times of all ranks; where that fails, why: the first rank's reason
        is told by all."""
        if transport is not None and not self.is_cut:
            self._measure_what_stages_cost(transport)
        measured: dict[int, StepCosts] = {}
        failure: Exception | None = None
        try:
            measured = {count: self._costs(name, step, micro) for count, micro in microbatches.items()}
        except Exception as error:
            failure = error
        is_measured = bool(measured) and all(costs.is_measured for costs in measured.values())
        times = [t for costs in measured.values() for t in costs.both_ways] if is_measured else []
        times, speeds = of_all_ranks(times, transport, share_cores=self._machine.cores is not None)
        self._machine = replace(self._machine, speeds=speeds)
        return failure or (_with_times(measured, times) if is_measured else measured)

    def _measure_what_stages_cost(self, transport: Transport) -> None:
        link = measure_link(transport, self._device)
        own = measure_overhead(transport, self._device, link.message if link is not None else 0.0)
        if link is not None:
            self._machine = replace(self._machine, **asdict(link), overhead=own.action, event=own.event)

    def decide_at_start(self, broadcast: Callable[[Any], Any], *, is_first: bool) -> StagePlan | None:
        """The plan for a module that must not be whole on a rank, by estimate; None for one that may, to be measured.

        Such a module is built on the meta device, or more than the device of rank 0 has memory for.
        """
        return with_everybody(
            lambda: self._estimated() if self._is_big() else None,
            broadcast,
            decides=is_first,
        )

    def _is_big(self) -> bool:
        if any(parameter.is_meta for parameter in self._module.parameters()):
            return True
        state_bytes = bytes_with_state(self._module, [])
        total = sum(state_bytes(name) for name, _ in self._module.named_parameters())
        return total > self._machine.limit(0)

    def _estimated(self) -> StagePlan:
        module, trainer = self._module, self._module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            raise ValueError(
                f"{type(module).__name__} does not fit one device and has no stage_config, and where to cut it is "
                f"found for training only: name the first module of each later stage, or fit it first"
            )
        with unnoticed(self._module, self._device):
            batch = sample_batch(training_loader(trainer))
            count = self._counts(batch)[-1]
            costs = estimate_training_step(module, microbatches_of(batch, count, module)[0], self._device)
            plan, _ = plan_stages(costs, self._schedules(count), self._machine, bytes_with_state(module, []))
        print_plan(plan)
        return plan

    def _microbatches(self, batch: Any) -> dict[int, Any]:
        """To be measured: one of each size, or of the smallest and the largest."""
        counts = self._counts(batch)
        return {count: microbatches_of(batch, count, self._module)[0] for count in {counts[0], counts[-1]}}

    def _plans(
        self,
        measured: Mapping[int, StepCosts],
        step: Step,
        microbatches: Mapping[int, Any],
        optimizers: Sequence[Optimizer],
        counts: Sequence[int],
        most: int,
    ) -> list[StagePlan]:
        """The best one for each of these numbers of micro-batches, by its time, and after them others, `most` or so in
        all."""
        few, many = counts[0], counts[-1]
        effort = EFFORT / len(counts) / (1 if self._machine.cores is None else _SLOWER)
        state_bytes = bytes_with_state(self._module, optimizers)
        best: list[StagePlan] = []
        others: list[StagePlan] = []
        for count in counts:
            ranked = ranked_plans(
                between(measured[few], measured[many], _share(count, counts)),
                self._schedules(count),
                self._machine,
                state_bytes,
                fault_of=lambda plan: fault_of_cut(self._module, plan, step, microbatches[few]),
                effort=effort,
                most=most,
            )
            own, *more = (plan for plan, _ in islice(ranked, max(1, most // len(counts))))
            best.append(own)
            others += more
        return sorted(best, key=lambda plan: plan.step_seconds) + others

    def _schedules_of(self, plan: StagePlan) -> Schedules:
        choice = ScheduleChoice(plan.schedule) if self._choice.is_auto else self._choice
        return choice.bind(
            num_stages=plan.num_stages,
            num_virtual_stages=len(plan.stages) // plan.num_stages,
            num_microbatches=plan.num_microbatches,
        )

    def _costs(self, name: str, step: SeededStep, microbatch: Any) -> StepCosts:
        try:
            return replace(measure_step(self._module, step, microbatch, self._device), step=name)
        except torch.OutOfMemoryError:
            # All of the model at once does not fit, with what it keeps for backward, and a stage may well.
            if name != "training_step":
                raise
            return estimate_training_step(self._module, microbatch, self._device)

    def _counts(self, batch: Any) -> list[int]:
        """Numbers of micro-batches to choose from, ascending."""
        if isinstance(self._num_microbatches, int):
            return [self._num_microbatches]
        samples = batch_size(batch) or 1
        return [n for n in (factor * self._num_stages for factor in _FACTORS) if n <= samples] or [self._num_stages]

    def _schedules(self, num_microbatches: int) -> list[Schedule]:
        """To choose from."""
        sizes = {"num_stages": self._num_stages, "num_microbatches": num_microbatches}
        if not self._choice.is_auto:
            return [self._choice.bind(**sizes, num_virtual_stages=self.num_virtual_stages).full]
        found: list[Schedule] = []
        for choice, virtual in ((ScheduleChoice(name), v) for v, names in _CONSIDERED.items() for name in names):
            try:
                found.append(choice.bind(**sizes, num_virtual_stages=virtual).full)
            except ScheduleError:
                continue
        return found


def _with_times(measured: Mapping[int, StepCosts], times: Sequence[float]) -> dict[int, StepCosts]:
    """The same costs with other times, those of all of them one after another."""
    left = iter(times)
    return {count: costs.with_times([*islice(left, len(costs.both_ways))]) for count, costs in measured.items()}


def _share(count: int, counts: Sequence[int]) -> float:
    """Where a micro-batch of a batch cut in `count` lies between those of the first and of the last of the counts."""
    first, last = 1 / counts[0], 1 / counts[-1]
    return (first - 1 / count) / (first - last) if first > last else 0.0


def cut_before(module: LightningModule, num_stages: int) -> dict[str, int]:
    """Where an earlier run has cut this module into as many stages: its parts may be on their ranks already."""
    before: StagePlan | None = vars(module).get(_PLAN)
    return dict(before.stage_config) if before is not None and before.num_stages == num_stages else {}


def note_cut(module: LightningModule, plan: StagePlan) -> None:
    """For `cut_before`, and for loggers, which get the plan as a hyper-parameter."""
    vars(module)[_PLAN] = plan
    for logger in module.trainer.loggers:
        logger.log_hyperparams({"pipeline_plan": {k: v for k, v in plan.as_dict().items() if k != "stages"}})


def _memory_of(device: torch.device) -> float | None:
    """What a device has for a stage; None where there is no telling."""
    info = None if device.type == "cpu" else getattr(torch.get_device_module(device), "mem_get_info", None)
    return _USABLE * info(device)[1] if info is not None else None
