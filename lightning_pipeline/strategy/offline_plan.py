"""Plans a training script's model for devices that this machine does not have.

The script runs up to its `Trainer.fit`, with parameters on the meta device and the Trainer on the CPU.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipeline.partition.batches import microbatches_of
from lightning_pipeline.partition.microbatch import batch_size
from lightning_pipeline.partition.stage_config import read_stage_config
from lightning_pipeline.partition.stage_map import resolve
from lightning_pipeline.planning.cost_model import Machine
from lightning_pipeline.planning.observing import Step
from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.planning.planner import NothingToCutError, ranked_plans
from lightning_pipeline.planning.rebalance import Rebalance, rebalance
from lightning_pipeline.planning.tracing import DeviceSpeed, estimate_step
from lightning_pipeline.schedules import Kind, Schedule, ScheduleError, Simulation, measured_costs, recorded_schedule
from lightning_pipeline.schedules.report import placement_of_timeline
from lightning_pipeline.schedules.timeline import Timeline

from .._lightning import LightningDataModule, LightningModule, Trainer, rank_zero_warn
from .lightning_private import configured_optimizers
from .measure import after_batch, bytes_with_state, loss_step
from .pipeline import PipelineStrategy
from .schedule_choice import TRAINING_SCHEDULES, ScheduleChoice


@dataclass
class OfflinePlans:
    """The best plan for each schedule.

    Attributes:
        model: the LightningModule's class.
        plans: by schedule, with their simulations, the fastest first; all fit the memory.
        left_out: by schedule, why there is no plan.
    """

    model: str
    num_parameters: int
    batch_size: int
    plans: dict[str, tuple[StagePlan, Simulation]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def plan_on_paper(
    script: Path,
    arguments: Sequence[str],
    *,
    num_stages: int,
    num_microbatches: int | None,
    schedules: Sequence[str],
    speed: DeviceSpeed,
    machine: Machine,
    progress: Callable[[str], None] = lambda what: None,
) -> OfflinePlans:
    """Estimate the training step of a script and search the best cut for each schedule.

    Raises:
        ValueError: there is no step to estimate, or the model fits with none of the schedules; the message is about
            the last one.
        NothingToCutError: the step has too few places to cut.
    """
    progress(f"running {script} until it calls Trainer.fit")
    made = rehearse_script(script, arguments)
    module, own = made.module, made.strategy
    asked = own.num_microbatches if own is not None else None
    count = num_microbatches or (asked if isinstance(asked, int) else 4 * num_stages)
    batch = made.first_batch()
    microbatch = microbatches_of(batch, count, module)[0]
    progress(f"estimating the step of {type(module).__name__} on a micro-batch")
    costs = estimate_step(module, _step_of(made), microbatch, speed)
    state_bytes = bytes_with_state(module, _optimizers(made))
    numbers = sum(parameter.numel() for parameter in module.parameters())
    found = OfflinePlans(type(module).__name__, numbers, batch_size(batch) or 1)
    failure: ValueError | None = None
    seen: list[Schedule] = []
    names = list(schedules or TRAINING_SCHEDULES)
    for number, name in enumerate(names, 1):
        progress(f"searching the best cut for {name} ({number} of {len(names)})")
        try:
            choice = ScheduleChoice(name)
            virtual = choice.usual_virtual_stages
            schedule = choice.bind(num_stages=num_stages, num_microbatches=count, num_virtual_stages=virtual).full
            if schedule in seen:
                found.left_out[name] = f"here the same as {seen[seen.index(schedule)].name}"
                continue
            seen.append(schedule)
            found.plans[name] = next(ranked_plans(costs, [schedule], machine, state_bytes))
        except ValueError as error:
            found.left_out[name] = str(error)
            # That the model does not fit says more than that a schedule cannot have these counts.
            if failure is None or not isinstance(error, (NothingToCutError, ScheduleError)):
                failure = error
    if failure is not None and not found.plans:
        raise failure
    found.plans = dict(sorted(found.plans.items(), key=lambda item: item[1][0].step_seconds))
    return found


def rebalance_on_paper(script: Path, arguments: Sequence[str], timeline: Timeline, *, speed: DeviceSpeed) -> Rebalance:
    """Which modules of a script's model to move to other stages, judging by the timeline of a run."""
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
            f"{type(module).__name__} has no stage_config, so the stages of the timeline are unknown: pin the cut of "
            f"that run (strategy.plan.save(path), stage_config=path)"
        )
    placement = placement_of_timeline(timeline)
    schedule = recorded_schedule(timeline, placement)
    has_virtual_stages = schedule.num_stages > schedule.num_ranks
    stages = resolve(module, config, schedule.num_ranks, has_virtual_stages=has_virtual_stages)
    microbatch = microbatches_of(made.first_batch(), schedule.num_microbatches, module)[0]
    costs = estimate_step(module, _step_of(made), microbatch, speed)
    return rebalance(costs, stages.exact, measured_costs([timeline], placement), schedule)


def _step_of(made: ScriptRun) -> Step:
    module = made.module
    made.trainer.precision_plugin.convert_module(module)
    vars(module)["log"] = lambda *args, **kwargs: None
    return loss_step(module, "training_step", after_batch(module, 0), torch.device("cpu"))


def _optimizers(made: ScriptRun) -> list[Optimizer]:
    try:
        return configured_optimizers(made.module)
    except Exception as error:  # a scheduler may ask the Trainer for the number of steps, for example
        rank_zero_warn(
            f"{type(made.module).__name__}.configure_optimizers does not run outside of training "
            f"({type(error).__name__}: {error}), so memory is estimated with AdamW's state"
        )
        return []


@dataclass
class ScriptRun:
    """A script's objects when it called `Trainer.fit`.

    Attributes:
        module: with its parameters on the meta device.
        trainer: on the CPU, whatever the script asks for.
        strategy: the script's own, if it is a PipelineStrategy.
    """

    module: LightningModule
    trainer: Trainer
    strategy: PipelineStrategy | None
    loader: Any

    def first_batch(self) -> Any:
        """The first training batch."""
        loader = self.loader.train_dataloader() if hasattr(self.loader, "train_dataloader") else self.loader
        return next(iter(loader))


class _Fitting(BaseException):
    """Ends the script. Not an Exception, lest the script catches it."""


def rehearse_script(path: Path, arguments: Sequence[str]) -> ScriptRun:
    """Run `path` as ``python path arguments...`` does, until it calls `Trainer.fit`.

    Parameters move to the meta device as modules register them, so a model takes no more memory than its largest
    parameter, and initialising them afterwards costs nothing.
    """
    found: list[ScriptRun] = []
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]),
        _without_devices(found),
        _parameters_on_meta(),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Fitting:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ValueError(f"{path} ended with exit code {end.code} before it called Trainer.fit") from None
        if not found:
            raise ValueError(f"{path} ended without a call of Trainer.fit, so there is no step to plan for")
        made = found[0]
        made.module.trainer = made.trainer
        if isinstance(made.loader, LightningDataModule):
            made.loader.trainer = made.trainer
            made.loader.setup("fit")
        made.trainer.strategy.connect(made.module)
        made.module.setup("fit")
        made.module.configure_model()
    return made


@contextmanager
def _without_devices(found: list[ScriptRun]) -> Iterator[None]:
    """While entered, Trainers use one CPU device, and end the script in `fit`."""
    plain_init = Trainer.__init__
    strategies: dict[int, Any] = {}

    def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        strategies[id(self)] = kwargs.get("strategy")
        kwargs.update(accelerator="cpu", devices=1, num_nodes=1, strategy="auto", logger=False, callbacks=None)
        plain_init(self, *args, **{**kwargs, "enable_checkpointing": False, "enable_progress_bar": False})

    def fit(self: Trainer, model: Any, train_dataloaders: Any = None, *args: Any, **kwargs: Any) -> None:
        loader = next((x for x in (kwargs.get("datamodule"), train_dataloaders) if x is not None), model)
        asked = strategies.get(id(self))
        found.append(ScriptRun(model, self, asked if isinstance(asked, PipelineStrategy) else None, loader))
        raise _Fitting

    with mock.patch.object(Trainer, "__init__", init), mock.patch.object(Trainer, "fit", fit):
        yield


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    plain = nn.Module.register_parameter
    meta: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and not nn.parameter.is_lazy(param):
            if id(param) not in meta:  # tied parameters stay tied
                empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
                param.data = param.data.new_empty(0)  # frees the memory; the object stays, so its id is not reused
                meta[id(param)] = (param, empty)
            param = meta[id(param)][1]
        plain(self, name, param)

    with mock.patch.object(nn.Module, "register_parameter", register):
        yield
