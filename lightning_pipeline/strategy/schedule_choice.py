"""The schedule that `schedule=` asks for: by name, file or function; `advisor` finds the fastest one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    Kind,
    Schedule,
    ScheduleError,
    as_schedule,
    build,
    build_for_batch,
    check,
    default_virtual_stages,
    fuse,
    load_csv,
)
from lightning_pipeline.schedules.builders import V_NAMES
from lightning_pipeline.schedules.optimizing import OPTIMIZED
from lightning_pipeline.schedules.validation import require_counts

AUTO = "auto"
TRAINING_SCHEDULES = tuple(name for name in SCHEDULE_NAMES if name != "forward")

ScheduleArgument = str | PathLike[str] | Schedule | Callable[..., Any]


class ScheduleChoice:
    """The schedule of training steps, as far as it is known before the module is cut.

    Args:
        schedule: a name, "auto", "optimized", the path of a ``.csv`` file, a :class:`Schedule`, or a function
            ``(num_stages, num_microbatches) -> schedule`` that may also take ``num_virtual_stages`` and returns a
            :class:`Schedule` or, for each rank, a list such as ``["0F0", "0B0"]``.

    Raises:
        ValueError: the argument is none of these.
        FileNotFoundError: the file does not exist.
    """

    def __init__(self, schedule: ScheduleArgument) -> None:
        self.name = ""
        self.fixed: Schedule | None = None
        self.function: Callable[..., Any] | None = None
        if isinstance(schedule, Schedule):
            self.fixed = schedule.compute()
        elif isinstance(schedule, (str, PathLike)) and str(schedule).endswith(".csv"):
            if not Path(schedule).is_file():
                raise FileNotFoundError(f"schedule={str(schedule)!r} is not a file; save one with schedules.save_csv")
            self.fixed = load_csv(schedule)
        elif callable(schedule):
            self.function = schedule
        elif schedule in (AUTO, OPTIMIZED) or schedule in TRAINING_SCHEDULES:
            self.name = str(schedule)
        else:
            raise ValueError(
                f"schedule is one of {', '.join(map(repr, (*TRAINING_SCHEDULES, AUTO, OPTIMIZED)))}, the path of a "
                f".csv file, a Schedule or a function (num_stages, num_microbatches) -> schedule; got {schedule!r}"
            )
        self.label = self.name or (self.fixed.name if self.fixed else getattr(schedule, "__name__", repr(schedule)))

    @property
    def is_auto(self) -> bool:
        """Whether the first steps are to decide."""
        return self.name in (AUTO, OPTIMIZED)

    @property
    def optimizes(self) -> bool:
        """Whether they are to be followed by a search for an order of its own."""
        return self.name == OPTIMIZED

    @property
    def has_virtual_stages(self) -> bool:
        """Whether a rank may hold several virtual stages, so that stage_config may number more stages than ranks."""
        if self.fixed is not None:
            return self.fixed.num_stages > self.fixed.num_ranks
        return self.function is not None or self.is_auto or default_virtual_stages(self.name) > 1

    @property
    def usual_virtual_stages(self) -> int:
        """Virtual stages per rank where stage_config does not tell."""
        if self.fixed is not None:
            return self.fixed.num_stages // self.fixed.num_ranks
        return 1 if self.function is not None or self.is_auto else default_virtual_stages(self.name)

    @property
    def num_microbatches(self) -> int | None:
        """The number that a file or a `Schedule` is made for; None if any goes."""
        return self.fixed.num_microbatches if self.fixed is not None else None

    def bind(
        self, *, num_stages: int, num_virtual_stages: int, num_microbatches: int, ranks: Mapping[int, int] | None = None
    ) -> Schedules:
        """The schedules for `num_stages` ranks with `num_virtual_stages` each.

        Args:
            ranks: of the stages that are to be on certain ones.

        Raises:
            ScheduleError: the schedule is unsound, or not one for these counts and ranks.
        """
        full = self._full(num_stages, num_virtual_stages, num_microbatches)
        if self.name:
            full = full.on_ranks(ranks or {})
            check(full)
            return Schedules(fuse(full), full.name, ranks)
        _require(full, self.label, num_stages, num_virtual_stages, num_microbatches)
        for stage, rank in (ranks or {}).items():
            if full.placement[stage] != rank:
                raise ScheduleError(
                    f"stage_config puts stage {stage} on rank {rank}, and schedule {self.label!r} has it on rank "
                    f"{full.placement[stage]}: name no rank, or reorder the schedule's"
                )
        check(full)
        return Schedules(full)

    def _full(self, num_stages: int, num_virtual_stages: int, num_microbatches: int) -> Schedule:
        if self.fixed is not None:
            return self.fixed
        if self.function is not None:
            return self._called(self.function, num_stages, num_virtual_stages, num_microbatches)
        if self.name in V_NAMES and num_virtual_stages != 2 and num_stages > 1:
            raise ScheduleError(
                f"{self.name} lays 2 virtual stages on each device, so {num_stages} devices take {2 * num_stages}, and "
                f"stage_config makes {num_stages * num_virtual_stages}; cut the model into {2 * num_stages}, or choose "
                f"interleaved_zero_bubble"
            )
        require_counts(num_stages, num_microbatches, num_virtual_stages)  # larger ones can be simulated, not run
        # On one device nothing is cut, and every schedule is the same.
        name = self.name if num_stages > 1 else "1f1b"
        return build(name, num_stages, num_microbatches, num_virtual_stages)

    def _called(
        self, function: Callable[..., Any], num_stages: int, num_virtual_stages: int, num_microbatches: int
    ) -> Schedule:
        """The schedule that the user's function gives."""
        parameters = inspect.signature(function)
        takes_virtual = "num_virtual_stages" in parameters.parameters
        keywords = {"num_virtual_stages": num_virtual_stages} if takes_virtual else {}
        try:
            parameters.bind(num_stages, num_microbatches, **keywords)
        except TypeError as error:
            raise ValueError(
                f"the schedule {self.label!r} cannot be called as (num_stages, num_microbatches): {error}; give its "
                f"other parameters defaults, or bind them with functools.partial"
            ) from None
        made = function(num_stages, num_microbatches, **keywords)
        return as_schedule(made, name=self.label, num_microbatches=num_microbatches).compute()


class Schedules:
    """The schedule of a step for each number of micro-batches, all on one placement.

    Args:
        name: of a schedule that is built for each number; "" for one that is cut down to it.
    """

    def __init__(self, full: Schedule, name: str = "", ranks: Mapping[int, int] | None = None) -> None:
        self.full, self.placement = full, full.placement
        self._name, self._ranks = name, ranks or {}

    def __call__(self, num_microbatches: int) -> Schedule:
        """The schedule for `num_microbatches`, of which a small last batch makes fewer than usual."""
        if self._name:
            num_ranks = self.full.num_ranks
            made = build_for_batch(self._name, num_ranks, num_microbatches, self.full.num_stages // num_ranks)
            return fuse(made.on_ranks(self._ranks))
        return self.full.take(num_microbatches)


def _require(schedule: Schedule, label: str, num_stages: int, num_virtual_stages: int, num_microbatches: int) -> None:
    """Check that a schedule of the user's fits the counts and the engine."""
    found = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
    wanted = (num_stages, num_stages * num_virtual_stages, num_microbatches)
    if found != wanted:
        raise ScheduleError(
            f"schedule {label!r} is for {found[0]} ranks, {found[1]} virtual stages and {found[2]} micro-batches, and "
            f"num_stages={wanted[0]}, {wanted[1]} virtual stages in stage_config and num_microbatches={wanted[2]} ask "
            f"for another; change either"
        )
    if not schedule.has_backward:
        raise ScheduleError(f"schedule {label!r} has forwards only; training needs B, or I and W, of every micro-batch")
    for rank, order in enumerate(schedule.orders):
        latest: dict[int, int] = {}
        for position, action in enumerate(order):
            if action.kind is Kind.F and action.microbatch < latest.get(action.stage, 0):
                raise schedule.error(
                    f"rank {rank} runs {action} after micro-batch {latest[action.stage]}; forwards of a stage ascend",
                    {(rank, position)},
                )
            if action.kind is Kind.F:
                latest[action.stage] = action.microbatch
