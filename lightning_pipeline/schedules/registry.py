"""The named schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import NamedTuple

from lightning_pipeline.schedules.builders import (
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_1f1b_low_memory,
    one_f_one_b,
)
from lightning_pipeline.schedules.schedule import Schedule
from lightning_pipeline.schedules.validation import ScheduleError
from lightning_pipeline.schedules.zero_bubble import interleaved_zero_bubble, zbv, zero_bubble


class _Entry(NamedTuple):
    builder: Callable[[int, int, int], Schedule]
    default_virtual_stages: int


_SCHEDULES = {
    "forward": _Entry(forward_only, 1),
    "gpipe": _Entry(gpipe, 1),
    "looped_bfs": _Entry(gpipe, 2),
    "1f1b": _Entry(one_f_one_b, 1),
    "interleaved_1f1b": _Entry(interleaved_1f1b, 2),
    "interleaved_1f1b_low_memory": _Entry(interleaved_1f1b_low_memory, 2),
    "zero_bubble": _Entry(zero_bubble, 1),
    "interleaved_zero_bubble": _Entry(interleaved_zero_bubble, 2),
    "zbv": _Entry(zbv, 2),
}

SCHEDULE_NAMES = tuple(_SCHEDULES)
"""The names that :func:`build` knows."""


def build(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Build the schedule called ``name``, with compute actions only.

    Args:
        name: one of :data:`SCHEDULE_NAMES`; "looped_bfs" is "gpipe" under the name it has with several virtual stages.
        num_ranks: ranks that work together on one copy of the model.
        num_microbatches: micro-batches in one step; for training at least ``num_ranks``.
        num_virtual_stages: virtual stages on each rank; 1 for "1f1b" and "zero_bubble", 2 for "zbv".

    Raises:
        ScheduleError: for an unknown name or counts that the schedule cannot have.
    """
    schedule = build_for_batch(name, num_ranks, num_microbatches, num_virtual_stages)
    if schedule.has_backward and num_microbatches < num_ranks:
        raise ScheduleError(
            f"num_microbatches must be at least the number of ranks for training, got num_microbatches="
            f"{num_microbatches} for {num_ranks} ranks; use {num_ranks} micro-batches or more, or fewer ranks"
        )
    return schedule


def build_for_batch(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """:func:`build` for any number of micro-batches, on the same placement.

    For a last batch that is too small for one micro-batch on each rank: it leaves ranks idle, but has to be trained.
    """
    return replace(_entry(name).builder(num_ranks, num_microbatches, num_virtual_stages), name=name)


def placement_of(name: str, num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """For each virtual stage, the rank where the schedule called ``name`` has it, whatever the micro-batches.

    Raises:
        ScheduleError: for an unknown name or a number of virtual stages that the schedule cannot have.
    """
    return build_for_batch(name, num_ranks, 1, num_virtual_stages).placement


def default_virtual_stages(name: str) -> int:
    """Virtual stages on each rank where nothing says otherwise: two for those that interleave, else one.

    Raises:
        ScheduleError: for an unknown name.
    """
    return _entry(name).default_virtual_stages


def _entry(name: str) -> _Entry:
    if name not in _SCHEDULES:
        close = get_close_matches(name, _SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ScheduleError(f"unknown schedule {name!r}; {hint}the schedules are {', '.join(_SCHEDULES)}")
    return _SCHEDULES[name]
