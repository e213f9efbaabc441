"""A plan on paper: where a training script's model would be cut for devices that are not there."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_pipeline.partition.estimate import estimate_step
from lightning_pipeline.partition.microbatch import batch_size, microbatches_of
from lightning_pipeline.partition.plan import NothingToCutError, StagePlan, plan_stages
from lightning_pipeline.partition.rebalance import Rebalance, rebalance
from lightning_pipeline.partition.stage_config import read_stage_config, resolve
from lightning_pipeline.partition.trace import Step
from lightning_pipeline.partition.work import DeviceSpeed
from lightning_pipeline.schedules import Kind, Schedule, ScheduleError, Simulation, measured_costs, recorded_schedule
from lightning_pipeline.schedules.balance import Machine
from lightning_pipeline.schedules.timeline import Timeline
from lightning_pipeline.strategy.lightning_private import configured_optimizers
from lightning_pipeline.strategy.measuring import bytes_with_state, loss_step
from lightning_pipeline.strategy.rehearsed_script import Rehearsed, rehearse_script
from lightning_pipeline.strategy.schedule_choice import TRAINING_SCHEDULES, ScheduleChoice


@dataclass(frozen=True)
class PaperPlans:
    """What came of each schedule.

    Attributes:
        model: the LightningModule's class.
        num_parameters: numbers in its parameters.
        batch_size: samples of a batch.
        plans: by schedule, the fastest first; all fit.
        simulations: of the plans.
        left_out: by schedule, why there is no plan.
    """

    model: str
    num_parameters: int
    batch_size: int
    plans: dict[str, StagePlan]
    simulations: dict[str, Simulation]
    left_out: dict[str, str]


def plan_on_paper(
    script: Path,
    arguments: Sequence[str],
    *,
    num_stages: int,
    num_microbatches: int | None,
    schedules: Sequence[str],
    speed: DeviceSpeed,
    machine: Machine,
) -> PaperPlans:
    """Estimate the training step of a script and search the best cut for each schedule.

    Raises:
        ValueError: there is no step to estimate, or the model fits with none of the schedules; the message is about
            the last of them.
        NothingToCutError: the step has too few places to cut.
    """
    made = rehearse_script(script, arguments)
    module, own = made.module, made.strategy
    asked = own.num_microbatches if own is not None else None
    count = num_microbatches or (asked if isinstance(asked, int) else 4 * num_stages)
    batch = made.first_batch()
    microbatch = microbatches_of(batch, count, module)[0]
    costs = estimate_step(module, _step_of(made), microbatch, speed)
    state_bytes = bytes_with_state(module, _optimizers(made))
    plans: dict[str, StagePlan] = {}
    simulations: dict[str, Simulation] = {}
    left_out: dict[str, str] = {}
    failure: ValueError | None = None
    seen: list[Schedule] = []
    for name in schedules or TRAINING_SCHEDULES:
        try:
            choice = ScheduleChoice(name)
            sizes = {"num_stages": num_stages, "num_microbatches": count}
            schedule = choice.bind(**sizes, num_virtual_stages=choice.usual_virtual_stages).full
            if schedule in seen:
                left_out[name] = f"here the same as {seen[seen.index(schedule)].name}"
                continue
            seen.append(schedule)
            plan, simulations[name] = plan_stages(costs, [schedule], machine, state_bytes)
            plans[name] = plan
        except (NothingToCutError, ScheduleError) as error:
            left_out[name] = str(error)
            failure = failure or error
        except ValueError as error:
            left_out[name] = str(error)
            failure = error
    if not plans:
        assert failure is not None
        raise failure
    plans = dict(sorted(plans.items(), key=lambda item: item[1].step_seconds))
    numbers = sum(parameter.numel() for parameter in module.parameters())
    return PaperPlans(type(module).__name__, numbers, batch_size(batch) or 1, plans, simulations, left_out)


def rebalance_on_paper(script: Path, arguments: Sequence[str], timeline: Timeline, *, speed: DeviceSpeed) -> Rebalance:
    """Which modules of a script's model to move to other stages, by the timeline of a run of it.

    Raises:
        ValueError: the timeline is of another cut than the script's, or of no run.
    """
    if len(timeline) > 1 and not any(action.kind is Kind.SEND_F for row in timeline for action, _, _ in row):
        raise ValueError(
            "the timeline has no sends, so it is of a simulation (as plan --draw writes) and tells nothing new: "
            "give the trace that PipelineTimeline has written of a run"
        )
    made = rehearse_script(script, arguments)
    module, own = made.module, made.strategy
    config = read_stage_config(module, own.stage_config if own is not None else None)
    if not config:
        raise ValueError(
            f"{type(module).__name__} has no stage_config, so there is no telling which stage the timeline's times are "
            f"of: pin the cut of that run (strategy.plan.save(path), stage_config=path)"
        )
    placement = [0] * (1 + max(action.stage for row in timeline for action, _, _ in row))
    for rank, row in enumerate(timeline):
        for action, _, _ in row:
            placement[action.stage] = rank
    schedule = recorded_schedule(timeline, placement)
    has_virtual_stages = schedule.num_stages > schedule.num_ranks
    stages = resolve(module, config, schedule.num_ranks, has_virtual_stages=has_virtual_stages)
    microbatch = microbatches_of(made.first_batch(), schedule.num_microbatches, module)[0]
    costs = estimate_step(module, _step_of(made), microbatch, speed)
    return rebalance(costs, stages.exact, measured_costs([timeline], placement), schedule, Machine())


def _step_of(made: Rehearsed) -> Step:
    module, plugin = made.module, made.trainer.precision_plugin
    plugin.convert_module(module)
    vars(module)["log"] = lambda *args, **kwargs: None
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    others = (0,) * takes_index
    return loss_step(module, "training_step", others, plugin.train_step_context, torch.device("cpu"))


def _optimizers(made: Rehearsed) -> list[Optimizer]:
    try:
        return configured_optimizers(made.module)
    except Exception as error:  # such as of a scheduler that asks the Trainer for the number of steps
        rank_zero_warn(
            f"{type(made.module).__name__}.configure_optimizers does not run outside of a training "
            f"({type(error).__name__}: {error}), so the memory is counted with AdamW's state"
        )
        return []
