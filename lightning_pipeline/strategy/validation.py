"""Refuses options and modules that cannot work in a pipeline, with the way out."""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
from typing import TYPE_CHECKING, Any

import yaml
from torch.distributed.tensor import DTensor

from lightning_pipeline._names import PACKAGES
from lightning_pipeline.engine.fully_sharded import is_sharded, sharded_elsewhere
from lightning_pipeline.partition.stage_config import AUTO
from lightning_pipeline.schedules import Schedule
from lightning_pipeline.schedules.offloading import away_in
from lightning_pipeline.schedules.validation import MAX_PASSES, MAX_PROCESSES, MAX_RANKS, shown

from .._lightning import (
    BatchSizeFinder,
    DoublePrecision,
    HalfPrecision,
    LightningModule,
    MixedPrecision,
    ModelPruning,
    Precision,
    Trainer,
    rank_zero_warn,
)
from ..checkpoint.state import copies_of
from .lightning_private import check_name, data_sources
from .schedule_choice import ScheduleChoice

if TYPE_CHECKING:
    from .pipeline import PipelineStrategy


DATA_PARALLEL = ("replicate", "zero1", "fsdp")
ALIKE = (
    *("num_stages", "num_microbatches", "max_live_microbatches", "max_live_bytes", "offload_activations"),
    *("gradients_mean", "data_parallel", "tensor_parallel_size", "context_parallel_size", "loss_reduction"),
    "output_broadcast",
)
"""Options that all ranks must agree on; the schedule is another."""
MAX_BYTES = 1 << 60


def data_parallel_of(data_parallel: str, *, opt_shard: bool) -> str:
    """The `data_parallel` that both options for sharding over replicas ask for; a ValueError if they contradict."""
    if data_parallel not in DATA_PARALLEL:
        raise ValueError(f'data_parallel is "replicate", "zero1" or "fsdp", got {data_parallel!r}')
    if opt_shard and data_parallel == "fsdp":
        raise ValueError('data_parallel="fsdp" shards the optimizer state already: leave opt_shard=True out')
    return "zero1" if opt_shard else data_parallel


def check_arguments(asked: PipelineStrategy, choice: ScheduleChoice) -> None:
    """Raise a ValueError for options with impossible values, or that do not go together."""
    if asked.loss_reduction not in ("mean", "sum"):
        raise ValueError(f'loss_reduction is "mean" or "sum", got {asked.loss_reduction!r}')
    if asked.start_method not in ("popen", "fork"):
        raise ValueError(f'start_method is "popen" or "fork", got {asked.start_method!r}')
    _check_count("tensor_parallel_size", asked.tensor_parallel_size, MAX_PROCESSES)
    if asked.tensor_parallel_size > 1 and asked.num_stages is None:
        raise ValueError(
            f"tensor_parallel_size={asked.tensor_parallel_size} needs num_stages as well, as configure_model gets the "
            f"device mesh before the stages are counted"
        )
    _check_count("context_parallel_size", asked.context_parallel_size, MAX_PROCESSES)
    if asked.context_parallel_size > 1:
        _check_context(asked)
    if asked.num_stages is not None:
        _check_count("num_stages", asked.num_stages, MAX_RANKS)
    if asked.num_microbatches is not None and asked.num_microbatches != AUTO:
        _check_count("num_microbatches", asked.num_microbatches, MAX_PASSES)
    if asked.max_live_microbatches is not None and not choice.is_auto:
        raise ValueError(
            f'max_live_microbatches={asked.max_live_microbatches} goes with schedule="auto" or "optimized", which '
            f"choose; with {choice.label!r} it is given"
        )
    if asked.max_live_bytes is not None:
        _check_live_bytes(asked, choice)

    offload = asked.offload_activations
    if not isinstance(offload, (bool, int, float)) or not 0 <= offload <= 1:
        raise ValueError(
            f"offload_activations is True, False, or the share of a stage's activations that goes to host memory, a "
            f"number from 0 to 1; got {shown(offload)}"
        )


def _check_live_bytes(asked: PipelineStrategy, choice: ScheduleChoice) -> None:
    """Raise a ValueError for a bound in bytes that is none, or goes with nothing that keeps it."""
    _check_count("max_live_bytes", asked.max_live_bytes, MAX_BYTES)
    if not choice.optimizes:
        raise ValueError(
            f'max_live_bytes={asked.max_live_bytes} goes with schedule="optimized", which measures what stages save '
            f"and searches for an order that keeps it; with {choice.label!r} leave it out"
        )
    if asked.max_live_microbatches is not None:
        raise ValueError(
            f"max_live_bytes={asked.max_live_bytes} and max_live_microbatches={asked.max_live_microbatches} bound the "
            f"same: leave one of them out"
        )


def warn_of_idle_offload(share: float, schedule: Schedule, label: str) -> None:
    """Say so where the option to send activations to host memory has nothing to send."""
    if share and not any(map(away_in, schedule.compute().orders)):
        reason = "one device, where each micro-batch runs backward at once"
        if schedule.num_ranks > 1:
            reason = (
                f"{label!r} on {schedule.num_ranks} devices with {schedule.num_microbatches} micro-batches: what waits "
                f"is needed again too soon for a device to hold less. `lightning-pipeline simulate -p "
                f"{schedule.num_ranks} -m {schedule.num_microbatches} --offload-activations 1` shows under which "
                f"schedules it helps"
            )
        rank_zero_warn(f"offload_activations={share} sends nothing to host memory under {reason}")


def _check_context(asked: PipelineStrategy) -> None:
    """Raise a ValueError for options that do not go with sequences in parts."""
    option = f"context_parallel_size={asked.context_parallel_size}"
    if asked.num_stages is None or asked.num_stages == 1:
        raise ValueError(
            f"{option} needs num_stages as well, 2 or more: sequences are cut where stages run, and in one process the "
            f"step runs as it is written"
        )
    if asked.tensor_parallel_size > 1:
        raise ValueError(
            f"{option} does not go with tensor_parallel_size={asked.tensor_parallel_size}, which gives DTensors, of "
            f"which no parts are cut: leave one of them out"
        )
    if asked.data_parallel == "fsdp":
        raise ValueError(
            f'{option} does not go with data_parallel="fsdp", which would leave gradients unsummed over the parts of '
            f'a sequence: use data_parallel="zero1", which shards the optimizer state'
        )


def _check_count(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a whole number from 1, got {shown(value)}")
    if value > most:
        raise ValueError(f"{name} is at most {most:,}, got {shown(value)}")


def check_trainer(trainer: Trainer) -> None:
    """Raise a TypeError or ValueError for sources of data or callbacks that a pipeline cannot run."""
    for source in data_sources(trainer):
        check_name(source)
    if trainer.world_size == 1:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning) and getattr(trainer.strategy, "data_parallel", None) == "fsdp":
            raise ValueError(
                f"{type(callback).__name__} renames parameters during the run (weight becomes weight_orig), and with "
                f'data_parallel="fsdp" slices are known by their names: use "zero1", which shards the optimizer state '
                f"only, or prune with torch.nn.utils.prune before the run"
            )
        if isinstance(callback, BatchSizeFinder):
            raise ValueError(
                f"{type(callback).__name__} (which Tuner.scale_batch_size uses, too) tries batches until a device is "
                f"full, but the devices of a pipeline are not full at once: choose batch_size, or raise "
                f"num_microbatches until it fits, or let `lightning-pipeline plan --memory` tell what fits"
            )


def check_by_hand(module: LightningModule, max_live_bytes: int | None) -> None:
    """Raise a ValueError where steps that are optimized by hand would have to keep a bound in bytes."""
    if max_live_bytes is not None:
        raise ValueError(
            f"max_live_bytes={max_live_bytes} is kept by an order that the first steps are measured for, and "
            f"{type(module).__name__} has automatic_optimization=False, whose steps are not measured: use "
            f'schedule="1f1b", or offload_activations, to hold less'
        )


def check_can_be_measured(module: LightningModule, tensor_parallel_size: int, context_parallel_size: int) -> None:
    """Raise a ValueError where a module cannot be cut automatically, as each rank has only slices of its tensors, or
    only parts of its sequences."""
    sizes = {"context_parallel_size": context_parallel_size, "tensor_parallel_size": tensor_parallel_size}
    for option, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"{type(module).__name__} has no stage_config, and with {option}={size} no rank can run a step by "
                f"itself to find where to cut: name the first module of each later stage"
            )


def check_slices(module: LightningModule, trainer: Trainer, *, fsdp: bool, tensor_parallel: bool) -> None:
    """Raise a ValueError where a callback or an option does not go with parameters in slices."""
    if fsdp and (copy := next(copies_of(module, trainer), None)) is not None:
        raise ValueError(
            f'a callback keeps a copy of {type(copy).__name__} for averaging, and data_parallel="fsdp" leaves no whole '
            f"weights to average: use data_parallel='zero1', which shards the optimizer state only, or drop it"
        )
    for name in sharded_elsewhere(module):
        raise ValueError(
            f"{name or 'the module'} of {type(module).__name__} is sharded by fully_shard, which would gather it for "
            f'each micro-batch: leave fully_shard out of configure_model, and set data_parallel="fsdp"'
        )
    slices = ((name, p) for name, p in module.named_parameters() if isinstance(p, DTensor) and not fsdp)
    sliced = next((name for name, p in slices if is_sharded(p) or not tensor_parallel), None)
    if sliced is not None:
        raise ValueError(
            f"{sliced} of {type(module).__name__} is a DTensor: if configure_model split it, set "
            f'tensor_parallel_size; if an earlier run with data_parallel="fsdp" did, use that again, or make a new '
            f"module and load a checkpoint"
        )


def check_precision(precision: Precision, *, is_single_process: bool) -> None:
    """Raise a ValueError for a precision plugin that the pipeline does not support. A single process supports any that
    has no backward of its own, several those of Lightning and classes of the user's that change how steps compute.
    """
    if is_single_process and type(precision).backward is Precision.backward:
        return
    classes = type(precision).__mro__
    own = list(itertools.takewhile(lambda cls: not cls.__module__.startswith(PACKAGES), classes))
    if classes[len(own)] not in (Precision, DoublePrecision, HalfPrecision, MixedPrecision):
        raise ValueError(
            f"the precision plugin {type(precision).__name__} (precision={precision.precision!r}) is not supported by "
            f"the pipeline strategy; use '32-true', '64-true', '16-mixed', 'bf16-mixed', 'bf16-true' or '16-true'"
        )
    changed = sorted({name for cls in own for name in vars(cls)}.intersection(_OF_GRADIENTS))
    if changed:
        raise ValueError(
            f"the precision plugin {type(precision).__name__} changes {' and '.join(changed)}, which would see the "
            f"gradients of one stage alone: do it in the LightningModule's hooks, such as configure_gradient_clipping "
            f"or on_before_optimizer_step"
        )


_OF_GRADIENTS = (
    *("connect", "pre_backward", "backward", "post_backward", "_after_closure", "_wrap_closure", "optimizer_step"),
    *("_clip_gradients", "clip_gradients", "clip_grad_by_value", "clip_grad_by_norm", "main_params"),
    *("unscale_gradients", "scaler"),
)
"""Methods and properties of a precision plugin that a backward or an update takes."""


PREFIX = "LIGHTNING_PIPELINE_"
_OTHERS = ("LAUNCHER",)  # variables that are no options


def options_in_environment(strategy: type, given_by_trainer: tuple[str, ...]) -> dict[str, Any]:
    """``LIGHTNING_PIPELINE_NUM_MICROBATCHES=8`` gives ``num_microbatches=8``, and so on for each option of `strategy`.

    Raises:
        ValueError: a variable of this kind names no option.
    """
    options = [name for name in inspect.signature(strategy).parameters if name not in given_by_trainer]
    found = {}
    for variable, value in os.environ.items():
        name = variable.removeprefix(PREFIX)
        if name == variable or name in _OTHERS:
            continue
        if name.lower() not in options:
            close = difflib.get_close_matches(name.lower(), options, 1) or options
            raise ValueError(
                f"{variable}={value} is set, but PipelineStrategy has no option {name.lower()!r}: unset it, or did you "
                f"mean {', '.join(f'{PREFIX}{each.upper()}' for each in close)}?"
            )
        found[name.lower()] = yaml.safe_load(value)
    return found
