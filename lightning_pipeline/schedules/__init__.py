"""Schedules as values: what each rank computes, sends and receives, and in which order.

A builder makes a schedule of compute actions, :func:`check` proves that it is sound, and :func:`lower` adds the
communication. :func:`simulate` computes its times, and :func:`render`, :func:`save_picture` and
:func:`save_chrome_trace` show them. Everything here needs the standard library only, pictures
matplotlib, and schedules of more than 262,144 passes numpy.
"""

from lightning_pipeline.schedules.builders import (
    SCHEDULE_NAMES,
    build,
    build_for_batch,
    default_virtual_stages,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_1f1b_low_memory,
    interleaved_zero_bubble,
    one_f_one_b,
    placement_of,
    v_half,
    v_min,
    zbv,
    zero_bubble,
    zero_bubble_h2,
)
from lightning_pipeline.schedules.checking import check
from lightning_pipeline.schedules.chrome_trace import save_chrome_trace
from lightning_pipeline.schedules.custom import as_schedule, load_csv, save_csv
from lightning_pipeline.schedules.lowering import fuse, lower
from lightning_pipeline.schedules.optimizing import Optimized, optimize
from lightning_pipeline.schedules.recorded_costs import Costs, measured_costs, recorded_schedule
from lightning_pipeline.schedules.schedule import Action, Kind, Schedule
from lightning_pipeline.schedules.simulation import Simulation, Span, render, simulate
from lightning_pipeline.schedules.timeline import Timeline, extent, idle_share, save_picture
from lightning_pipeline.schedules.validation import ScheduleError

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Costs",
    "Kind",
    "Optimized",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Span",
    "Timeline",
    "as_schedule",
    "build",
    "build_for_batch",
    "check",
    "default_virtual_stages",
    "dualpipe_v",
    "extent",
    "forward_only",
    "fuse",
    "gpipe",
    "idle_share",
    "interleaved_1f1b",
    "interleaved_1f1b_low_memory",
    "interleaved_zero_bubble",
    "load_csv",
    "lower",
    "measured_costs",
    "one_f_one_b",
    "optimize",
    "placement_of",
    "recorded_schedule",
    "render",
    "save_chrome_trace",
    "save_csv",
    "save_picture",
    "simulate",
    "v_half",
    "v_min",
    "zbv",
    "zero_bubble",
    "zero_bubble_h2",
]
