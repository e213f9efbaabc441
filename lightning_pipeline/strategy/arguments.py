"""Arguments of a PipelineStrategy, checked before anything starts."""

from __future__ import annotations

from lightning_pipeline.partition.stage_config import AUTO
from lightning_pipeline.schedules.errors import shown
from lightning_pipeline.schedules.limits import MAX_PASSES, MAX_PROCESSES, MAX_RANKS
from lightning_pipeline.strategy.schedule_choice import ScheduleChoice

ALIKE = (
    "num_stages",
    "num_microbatches",
    "max_live_microbatches",
    "gradients_mean",
    "opt_shard",
    "data_parallel",
    "tensor_parallel_size",
    "loss_reduction",
    "output_broadcast",
)
"""Those that all ranks have to be given alike, beside the schedule."""


def check_arguments(
    choice: ScheduleChoice,
    *,
    num_stages: int | None,
    num_microbatches: int | str | None,
    max_live_microbatches: float | None,
    opt_shard: bool,
    data_parallel: str,
    tensor_parallel_size: int,
    loss_reduction: str,
) -> None:
    """Raise for values that are none of those a `PipelineStrategy` takes, or do not go together.

    Raises:
        ValueError: names the value and the way out.
    """
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f'loss_reduction is "mean" or "sum", got {loss_reduction!r}')
    if data_parallel not in ("replicate", "fsdp"):
        raise ValueError(f'data_parallel is "replicate" or "fsdp", got {data_parallel!r}')
    if data_parallel == "fsdp" and opt_shard:
        raise ValueError('data_parallel="fsdp" shards the optimizer state already: leave opt_shard=True out')
    _check_count("tensor_parallel_size", tensor_parallel_size, MAX_PROCESSES)
    if tensor_parallel_size > 1 and num_stages is None:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} needs num_stages as well, as configure_model gets the "
            f"device mesh before the stages are counted"
        )
    if num_stages is not None:
        _check_count("num_stages", num_stages, MAX_RANKS)
    if num_microbatches is not None and num_microbatches != AUTO:
        _check_count("num_microbatches", num_microbatches, MAX_PASSES)
    if max_live_microbatches is not None and not choice.is_auto:
        raise ValueError(
            f'max_live_microbatches={max_live_microbatches} goes with schedule="auto", which chooses; '
            f"{choice.label!r} holds what it holds"
        )


def _check_count(name: str, value: int | str, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a whole number from 1, got {shown(value)}")
    if value > most:
        raise ValueError(f"{name} is at most {most:,}, got {shown(value)}")
