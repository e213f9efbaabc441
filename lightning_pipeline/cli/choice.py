"""Schedules as they are typed: by name, or as a CSV file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    Schedule,
    ScheduleError,
    build,
    check,
    default_virtual_stages,
    load_csv,
)


def choose(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int | None) -> Schedule:
    """Build a schedule, or read and check a CSV file, which brings its own counts.

    Args:
        name: a schedule's name or a path that ends in ``.csv``.
        num_ranks: ranks that hold one copy of the model.
        num_microbatches: micro-batches in one step.
        num_virtual_stages: virtual stages on each rank; None for the schedule's usual number.

    Raises:
        ScheduleError: for an unknown name, counts that the schedule cannot have, or a faulty file.
        OSError: if the file cannot be read.
    """
    if _is_file(name):
        schedule = replace(load_csv(name), name=Path(name).name)
        check(schedule)
        return schedule
    if num_virtual_stages is None:
        num_virtual_stages = default_virtual_stages(name)
    return build(name, num_ranks, num_microbatches, num_virtual_stages)


def choose_for_comparison(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int | None) -> Schedule:
    """As :func:`choose`, with the usual number of virtual stages where the schedule cannot have the given one."""
    try:
        return choose(name, num_ranks, num_microbatches, num_virtual_stages)
    except ScheduleError:
        if _is_file(name):
            raise
        return choose(name, num_ranks, num_microbatches, None)


def all_that_fit(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int | None
) -> tuple[list[Schedule], dict[str, str]]:
    """Every schedule for training that can be built for these counts, and by name why others are left out.

    Raises:
        ScheduleError: if there is none.
    """
    schedules: list[Schedule] = []
    left_out: dict[str, str] = {}
    for name in SCHEDULE_NAMES:
        try:
            schedule = choose_for_comparison(name, num_ranks, num_microbatches, num_virtual_stages)
        except ScheduleError as error:
            left_out[name] = str(error)
            continue
        # Equal is who does the same on every rank, whatever the name.
        if schedule in schedules:
            left_out[name] = f"here the same as {schedules[schedules.index(schedule)].name}"
        elif schedule.has_backward:
            schedules.append(schedule)
    if not schedules:
        raise ScheduleError(next(iter(left_out.values())))
    return schedules, left_out


def counts_of(schedule: Schedule) -> str:
    """Ranks, virtual stages where a rank has several, and micro-batches."""
    virtual = f", {virtual_stages_of(schedule):g} virtual stages each" * (schedule.num_stages > schedule.num_ranks)
    return f"{schedule.num_ranks} ranks{virtual}, {schedule.num_microbatches} micro-batches"


def virtual_stages_of(schedule: Schedule) -> float:
    """Virtual stages on a rank: a mean, where a file places them unevenly."""
    whole, rest = divmod(schedule.num_stages, schedule.num_ranks)
    return schedule.num_stages / schedule.num_ranks if rest else whole


def _is_file(name: str) -> bool:
    """True for a path of a CSV file, False for a schedule's name."""
    return name.lower().endswith(".csv")
