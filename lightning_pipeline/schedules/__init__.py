"""Schedules as data: what each rank computes, sends and receives, and in which order.

A builder writes compute actions, :func:`lower` adds the communication, :func:`check` proves the result, and
:func:`simulate` and :func:`render` show it. Standard library only.
"""

from lightning_pipeline.schedules.action import Action, Kind
from lightning_pipeline.schedules.builders import (
    build,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_1f1b_low_memory,
    one_f_one_b,
)
from lightning_pipeline.schedules.checking import check
from lightning_pipeline.schedules.csv_table import load_csv, save_csv
from lightning_pipeline.schedules.drawing import render
from lightning_pipeline.schedules.errors import ScheduleError
from lightning_pipeline.schedules.lowering import lower
from lightning_pipeline.schedules.schedule import Schedule
from lightning_pipeline.schedules.simulation import Simulation, Span, simulate

__all__ = [
    "Action",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Span",
    "build",
    "check",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_1f1b_low_memory",
    "load_csv",
    "lower",
    "one_f_one_b",
    "render",
    "save_csv",
    "simulate",
]
