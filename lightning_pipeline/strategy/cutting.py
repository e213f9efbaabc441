"""Where a module is cut: where somebody says, where an earlier run has cut it, or where the first step is fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_pipeline.partition.plan import StagePlan
from lightning_pipeline.partition.stage_config import AUTO, StageMap, count_stages, resolve
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy.automatic import AutomaticCut, cut_before, note_cut
from lightning_pipeline.strategy.refusals import check_tensors_are_whole
from lightning_pipeline.strategy.schedule_choice import ScheduleChoice


@dataclass(frozen=True)
class Cut:
    """A module in stages.

    Attributes:
        stages: of its submodules.
        num_microbatches: of a step.
        is_final: else it is to be cut again, so each rank goes on holding all of it.
    """

    stages: StageMap
    num_microbatches: int
    is_final: bool = True


class Cutting:
    """Finds the cut to set out with, and where that leaves it open, another one before the first step.

    Args:
        config: the keys of stage_config; empty where the cut is to be found automatically.
        choice: what `schedule=` stands for.
        num_stages: device groups, which share the virtual stages of a schedule that has such.
        num_microbatches: as the strategy was given it.
        replicas: of each stage.
        tensor_parallel_size: ranks among which the tensors of one are split.
        device: of this rank.
        broadcast: gives all ranks rank 0's object.
        is_first: this is rank 0, which decides for all.

    Attributes:
        plan: what was found, and is expected of it; None where nothing was searched.

    Raises:
        ValueError: there are fewer micro-batches than stages, or a rank alone cannot find out where to cut.
    """

    def __init__(
        self,
        module: LightningModule,
        config: Mapping[str, int],
        choice: ScheduleChoice,
        *,
        num_stages: int,
        num_microbatches: int | str | None,
        replicas: int,
        tensor_parallel_size: int,
        device: torch.device,
        broadcast: Callable[[Any], Any],
        is_first: bool,
    ) -> None:
        given = num_microbatches if isinstance(num_microbatches, int) else None
        count = given or choice.num_microbatches or 4 * num_stages
        if count < num_stages:
            raise ValueError(
                f"num_microbatches={count} is less than num_stages={num_stages}, so some stage would always be idle; "
                f"use num_microbatches={num_stages} or more, or fewer stages"
            )
        self.plan: StagePlan | None = None
        self._module = module
        self._config = config
        self._choice = choice
        self._num_stages = num_stages
        self._num_microbatches = count
        self._broadcast = broadcast
        self._is_first = is_first
        self._automatic: AutomaticCut | None = None
        if num_stages > 1 and not config:
            self._config = cut_before(module, num_stages)
        if num_stages > 1 and not self._config:
            check_tensors_are_whole(module, tensor_parallel_size)
            self._automatic = AutomaticCut(
                module,
                choice,
                num_stages=num_stages,
                num_microbatches=AUTO if num_microbatches == AUTO else count,
                replicas=replicas,
                device=device,
            )

    def at_start(self) -> Cut:
        """The cut that steps set out with. All ranks must call it.

        Raises:
            KeyError, ValueError: stage_config does not fit the module (`resolve`), or none can be found for it.
        """
        if self._automatic is None:
            return Cut(self._resolved(self._config, self._choice.has_virtual_stages), self._num_microbatches)
        plan = self._automatic.decide_at_start(self._broadcast, is_first=self._is_first)
        if plan is not None:
            return self._planned(plan, is_final=True)
        # Whatever cannot be cut yet stays whole everywhere until the first step.
        stages = StageMap(self._num_stages * self._automatic.num_virtual_stages)
        return Cut(stages, self._num_microbatches, is_final=False)

    def before_step(
        self,
        name: str,
        arguments: tuple[Any, ...],
        context: Callable[[], AbstractContextManager[Any]],
        *,
        optimizers: Sequence[Optimizer],
        transport: Transport | None,
    ) -> Cut | None:
        """The cut to go on with; None if it is that of the step before. All ranks must call it.

        The first training step decides. Of evaluation steps before it, those of a fit (the sanity check) run on the
        first rank, where the module is whole, and those of other functions in a cut of their own.

        Args:
            name: of the user's step, such as "training_step".
            arguments: the step's.
            context: the precision's context around it.

        Raises:
            ValueError: the step cannot be cut into as many stages, or no cut fits the memory.
        """
        automatic, is_training = self._automatic, name == "training_step"
        if automatic is None or (automatic.is_cut and not is_training):
            return None
        if not is_training and self._module.trainer.state.fn == TrainerFn.FITTING:
            return None
        plan = automatic.decide(
            name,
            arguments,
            context,
            optimizers,
            self._broadcast,
            transport=transport,
            is_first=self._is_first,
        )
        return self._planned(plan, is_final=is_training)

    def _planned(self, plan: StagePlan, *, is_final: bool) -> Cut:
        self.plan = plan
        if is_final:
            self._automatic = None
            note_cut(self._module, plan)
        return Cut(self._resolved(plan.stage_config, plan.has_virtual_stages), plan.num_microbatches, is_final)

    def _resolved(self, config: Mapping[str, int], has_virtual_stages: bool) -> StageMap:
        return resolve(self._module, config, self._num_stages, has_virtual_stages=has_virtual_stages)


def num_stages_for(config: Mapping[str, int], choice: ScheduleChoice, world_size: int) -> int:
    """The number of device groups where nobody says it: what the schedule is made for, or stage_config uses."""
    if choice.fixed is not None:
        return choice.fixed.num_ranks
    used = count_stages(config)
    if used is not None and choice.has_virtual_stages:
        return min(used, world_size)
    return used or world_size
