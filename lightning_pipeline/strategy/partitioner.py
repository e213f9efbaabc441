"""Decides where to cut a module: as configured, as in an earlier run, or where its first step runs fastest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from lightning_pipeline.engine.executor import RECEIVES_AHEAD
from lightning_pipeline.partition.batches import microbatches_of
from lightning_pipeline.partition.microbatch import batch_size
from lightning_pipeline.partition.stage_config import AUTO, Stage, count_stages
from lightning_pipeline.partition.stage_map import StageMap, resolve
from lightning_pipeline.planning.calibration import measure_link, measure_overhead
from lightning_pipeline.planning.cost_model import Machine
from lightning_pipeline.planning.plan import StagePlan, print_plan
from lightning_pipeline.planning.planner import EFFORT, NothingToCutError, plan_of_modules, ranked_plans
from lightning_pipeline.planning.profile import Profile, between
from lightning_pipeline.planning.restoring import left_as_it_was
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.transport import SEND_WINDOW, Transport
from lightning_pipeline.schedules import Schedule, ScheduleError

from .._lightning import LightningModule, TrainerFn, rank_zero_info
from .dataloading import sample_batch
from .lightning_private import training_loader
from .measure import (
    SeededStep,
    bytes_with_state,
    described,
    estimate_training_step,
    loss_step,
    measure_step,
    memory_of_ranks,
    on_all_ranks,
    reached_by_trainer,
    restored,
    speeds_of,
    without_side_effects,
)
from .schedule_choice import ScheduleChoice, Schedules
from .trials import MOST, TrialSteps, choose_plan, fault_of_cut
from .validation import check_can_be_measured

if TYPE_CHECKING:
    from .pipeline import PipelineStrategy

_PLAN = "_automatic_plan"
_FACTORS = (1, 2, 4, 8)
"""Micro-batches per stage to choose from, with num_microbatches="auto"."""

_CONSIDERED = {1: ("1f1b", "zero_bubble"), 2: ("interleaved_1f1b", "interleaved_zero_bubble", "zbv")}
"""Schedules to compare with schedule="auto", by virtual stages per rank. `Advisor` chooses among all of these later."""


@dataclass(frozen=True)
class Cut:
    """How a module is cut.

    Attributes:
        is_final: False if the module will be cut again, so that each rank goes on holding all of it.
    """

    stages: StageMap
    num_microbatches: int
    is_final: bool = True


class Partitioner:
    """Finds the cut for set-up and, where stage_config leaves it open, the final one before the first step.

    Without a stage_config all ranks measure the first step, and rank 0 searches for the best cut. Until then every
    rank holds the whole module.

    Args:
        config: the keys of stage_config; empty to find the cut automatically.

    Attributes:
        plan: the cut that was found, with its expected costs; None where none was searched for.

    Raises:
        ValueError: there are fewer micro-batches than stages, or one rank cannot measure a step by itself.
    """

    def __init__(
        self,
        strategy: PipelineStrategy,
        module: LightningModule,
        config: Mapping[str, Stage],
        num_stages: int,
        replicas: int,
    ) -> None:
        asked, choice, device = strategy.num_microbatches, strategy.schedule_choice, strategy.root_device
        given = asked if isinstance(asked, int) else None
        count = given or choice.num_microbatches or 4 * num_stages
        if count < num_stages:
            raise ValueError(
                f"num_microbatches={count} is less than num_stages={num_stages}, so some stage would always be idle; "
                f"use num_microbatches={num_stages} or more, or fewer stages"
            )
        self.plan: StagePlan | None = None
        self._module = module
        self._config = config or (cut_before(module, num_stages) if num_stages > 1 else {})
        self._choice = choice
        self._num_stages = num_stages
        self._num_microbatches = count
        self._chooses_microbatches = asked == AUTO
        self._device = device
        self._is_first = strategy.global_rank == 0
        self._everybody = partial(on_all_ranks, broadcast=strategy.broadcast, decides=self._is_first)
        self._is_open = num_stages > 1 and not self._config  # the first training step decides
        self._is_cut_for_evaluation = False
        if self._is_open:
            check_can_be_measured(module, strategy.tensor_parallel_size, strategy.context_parallel_size)
        self._machine = Machine(
            memory=memory_of_ranks(device, strategy, num_stages) if self._is_open else None,
            replicas=replicas,
            receives_ahead=RECEIVES_AHEAD,
            sends_underway=SEND_WINDOW if device.type == "cpu" else 1,
            offload=float(strategy.offload_activations),
        )

    def at_start(self) -> Cut:
        """The cut for set-up. All ranks must call it.

        Raises:
            KeyError, ValueError: stage_config does not fit the module (`resolve`), or no cut can be found.
        """
        if not self._is_open:
            return Cut(self._resolved(self._config, self._choice.has_virtual_stages), self._num_microbatches)
        plan = self._everybody(lambda: self._estimated() if self._is_big() else None)
        if plan is not None:
            return self._planned(plan, is_final=True)
        stages = StageMap(self._num_stages * self._choice.usual_virtual_stages)
        return Cut(stages, self._num_microbatches, is_final=False)

    @property
    def is_whole(self) -> bool:
        """Whether every rank still holds the whole module."""
        return self._is_open and not self._is_cut_for_evaluation

    def before_step(
        self,
        name: str,
        arguments: tuple[Any, ...],
        transport: Transport | None,
    ) -> Cut | None:
        """The cut to go on with; None to keep the present one. All ranks must call it.

        The first training step decides. Evaluation steps before it run on the first rank, which has the whole module,
        if they are a fit's sanity check; those of other functions get a cut of their own.

        Raises:
            ValueError: the step cannot be cut into so many stages, or no cut fits the memory.
        """
        is_training = name == "training_step"
        # A fit's sanity check would find the cut for evaluation, only to cut again for training right after.
        if transport is None or not self._is_open or (self._is_cut_for_evaluation and not is_training):
            return None
        if not is_training and self._module.trainer.state.fn == TrainerFn.FITTING:
            return None
        began = time.perf_counter()
        plan = self._found(name, arguments, transport)
        self._is_cut_for_evaluation = True
        if self._is_first:
            rank_zero_info(f'stage_config="auto" took {time.perf_counter() - began:.1f} s to find where to cut:')
            print_plan(plan)
        return self._planned(plan, is_final=is_training)

    def _planned(self, plan: StagePlan, *, is_final: bool) -> Cut:
        self.plan = plan
        if is_final:
            self._is_open = False
            note_cut(self._module, plan)
        return Cut(self._resolved(plan.stage_config, plan.has_virtual_stages), plan.num_microbatches, is_final)

    def _resolved(self, config: Mapping[str, Stage], has_virtual_stages: bool) -> StageMap:
        return resolve(self._module, config, self._num_stages, has_virtual_stages=has_virtual_stages)

    # -- by estimate --------------------------------------------------------------------------------------------------

    def _is_big(self) -> bool:
        """Whether no rank can hold the whole module: it is on the meta device, or larger than a device's memory."""
        if any(parameter.is_meta for parameter in self._module.parameters()):
            return True
        state_bytes = bytes_with_state(self._module, [])
        total = sum(state_bytes(name) for name, _ in self._module.named_parameters())
        return total > self._machine.least_limit(self._num_stages)

    def _estimated(self) -> StagePlan:
        module, trainer = self._module, self._module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            raise ValueError(
                f"{type(module).__name__} does not fit one device and has no stage_config, and where to cut it is "
                f"found for training only: name the first module of each later stage, or fit it first"
            )
        # The module is on the meta device or too big, so nothing can be measured: costs follow from the operations.
        with without_side_effects(self._module, self._device):
            batch = sample_batch(training_loader(trainer))
            count = self._counts(batch)[-1]
            costs = estimate_training_step(module, microbatches_of(batch, count, module)[0], self._device)
            plan, _ = next(
                ranked_plans(
                    costs,
                    self._schedules(count),
                    self._machine,
                    bytes_with_state(module, []),
                    moves_ranks=bool(self._choice.name),
                )
            )
        print_plan(plan)
        return plan

    # -- by measuring -------------------------------------------------------------------------------------------------

    def _found(
        self,
        name: str,
        arguments: tuple[Any, ...],
        transport: Transport,
    ) -> StagePlan:
        """The plan for a step, the same on all ranks: all measure, and rank 0 decides."""
        batch, *others = arguments

        def to_measure() -> dict[int, Any]:
            """A micro-batch of each size, or of the smallest and the largest."""
            counts = self._counts(batch)
            return {count: microbatches_of(batch, count, self._module)[0] for count in {counts[0], counts[-1]}}

        microbatches = restored(self._everybody(lambda: described(to_measure())), self._device)
        step = loss_step(self._module, name, tuple(others), self._device)
        with without_side_effects(self._module, self._device):
            # Ranks may measure unequally often, and only the first one records: the trials need the same module on all.
            with left_as_it_was(self._module, reached_by_trainer(self._module)):
                costs = self._costs_on_all(name, step, microbatches, transport)

            def ranked(most: int) -> list[StagePlan]:
                if isinstance(costs, Exception):
                    raise costs
                with left_as_it_was(self._module, reached_by_trainer(self._module)):
                    return self._plans(costs, step, microbatches, self._counts(batch), most)

            if name != "training_step":
                return self._everybody(lambda: ranked(1)[0])
            trial = TrialSteps(self._module, step, batch, transport, self._device, self._schedules_of)
            limit = self._machine.least_limit(self._num_stages)
            return choose_plan(lambda: ranked(MOST), trial.times, self._module, self._everybody, limit)

    def _costs_on_all(
        self, name: str, step: SeededStep, microbatches: Mapping[int, Any], transport: Transport
    ) -> dict[int, Profile] | Exception:
        """What a micro-batch of each size costs on this rank. All ranks measure at once, which also shows how fast each
        is. Returns the error where measuring fails: all ranks raise the first rank's."""
        if self.is_whole:
            self._measure_what_stages_cost(transport)
        measured: dict[int, Profile] = {}
        failure: Exception | None = None
        try:
            measured = {count: self._costs(name, step, micro) for count, micro in microbatches.items()}
        except Exception as error:  # not raised here, as the other ranks wait in `speeds_of`
            failure = error
        is_measured = bool(measured) and all(costs.is_measured for costs in measured.values())
        seconds = sum(costs.seconds for costs in measured.values()) if is_measured else float("nan")
        replicas: Replicas | None = self._module.trainer.strategy.replicas  # type: ignore[attr-defined]
        self._machine = replace(self._machine, speeds=speeds_of(seconds, transport, replicas))
        return failure or measured

    def _measure_what_stages_cost(self, transport: Transport) -> None:
        link = measure_link(transport, self._device)
        own = measure_overhead(transport, self._device, link.message if link is not None else 0.0)
        if link is not None:
            self._machine = replace(self._machine, **asdict(link), overhead=own)

    def _plans(
        self,
        measured: Mapping[int, Profile],
        step: SeededStep,
        microbatches: Mapping[int, Any],
        counts: Sequence[int],
        most: int,
    ) -> list[StagePlan]:
        """The best plan for each of these numbers of micro-batches, by its time, followed by others: about `most` in
        all."""
        few, many = counts[0], counts[-1]
        state_bytes = bytes_with_state(self._module, self._module.trainer.optimizers)
        best: list[StagePlan] = []
        others: list[StagePlan] = []
        try:
            for count in counts:
                ranked = ranked_plans(
                    between(measured[few], measured[many], _share(count, counts)),
                    self._schedules(count),
                    self._machine,
                    state_bytes,
                    fault_of=lambda plan: fault_of_cut(self._module, plan, step, microbatches[few]),
                    effort=EFFORT / len(counts),
                    most=most,
                    moves_ranks=bool(self._choice.name),  # the rows of others are the user's
                )
                own, *more = (plan for plan, _ in islice(ranked, max(1, most // len(counts))))
                best.append(own)
                others += more
        except NothingToCutError as error:
            # The step cannot be cut where modules begin: a cut by modules may send data back to an earlier stage.
            fault = ""
            for schedule in self._schedules(few):
                plan = plan_of_modules(measured[few], schedule, state_bytes)
                if plan is None:
                    continue
                fault = fault_of_cut(self._module, plan, step, microbatches[few], goes_back=True)
                if not fault:
                    return [plan]
            if fault:
                tried = "Tried a cut between modules that it calls more often"
                raise NothingToCutError(f"{error}. {tried}: {fault}") from None
            raise
        return sorted(best, key=lambda plan: plan.step_seconds) + others

    def _schedules_of(self, plan: StagePlan) -> Schedules:
        choice = ScheduleChoice(plan.schedule) if self._choice.is_auto else self._choice
        return choice.bind(
            num_stages=plan.num_stages,
            num_virtual_stages=len(plan.stages) // plan.num_stages,
            num_microbatches=plan.num_microbatches,
            ranks=dict(enumerate(stage.rank for stage in plan.stages)),
        )

    def _costs(self, name: str, step: SeededStep, microbatch: Any) -> Profile:
        try:
            return replace(measure_step(self._module, step, microbatch, self._device), step=name)
        except torch.OutOfMemoryError:
            # The whole model does not fit with its activations; a stage may.
            if name != "training_step":
                raise
            return estimate_training_step(self._module, microbatch, self._device)

    def _counts(self, batch: Any) -> list[int]:
        """Numbers of micro-batches to choose from, ascending."""
        if not self._chooses_microbatches:
            return [self._num_microbatches]
        samples = batch_size(batch) or 1
        return [n for n in (factor * self._num_stages for factor in _FACTORS) if n <= samples] or [self._num_stages]

    def _schedules(self, num_microbatches: int) -> list[Schedule]:
        """The schedules to choose from."""
        sizes: dict[str, Any] = {"num_stages": self._num_stages, "num_microbatches": num_microbatches}
        if not self._choice.is_auto:
            return [self._choice.bind(**sizes, num_virtual_stages=self._choice.usual_virtual_stages).full]
        found: list[Schedule] = []
        for choice, virtual in ((ScheduleChoice(name), v) for v, names in _CONSIDERED.items() for name in names):
            try:
                found.append(choice.bind(**sizes, num_virtual_stages=virtual).full)
            except ScheduleError:
                continue
        return found


def num_stages_for(config: Mapping[str, Stage], choice: ScheduleChoice, world_size: int) -> int:
    """The number of stages where the user does not give it: that of the schedule, or what stage_config uses."""
    if choice.fixed is not None:
        return choice.fixed.num_ranks
    used = count_stages(config)
    if used is not None and choice.has_virtual_stages:
        return min(used, world_size)
    return used or world_size


def _share(count: int, counts: Sequence[int]) -> float:
    """Where the size of a micro-batch lies between those of the first (0) and the last of the counts (1)."""
    first, last = 1 / counts[0], 1 / counts[-1]
    return (first - 1 / count) / (first - last) if first > last else 0.0


def cut_before(module: LightningModule, num_stages: int) -> dict[str, Stage]:
    """The stage_config by which an earlier run has cut this module: its parts may be on their ranks already."""
    before: StagePlan | None = vars(module).get(_PLAN)
    return dict(before.stage_config) if before is not None and before.num_stages == num_stages else {}


def note_cut(module: LightningModule, plan: StagePlan) -> None:
    """Remember the plan for `cut_before`, and log it as a hyper-parameter."""
    vars(module)[_PLAN] = plan
    for logger in module.trainer.loggers:
        logger.log_hyperparams({"pipeline_plan": {k: v for k, v in plan.as_dict().items() if k != "stages"}})
