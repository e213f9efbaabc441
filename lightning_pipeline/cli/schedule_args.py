"""Schedules and their costs as they are typed on the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lightning_pipeline.cli.common import CommandError
from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    Schedule,
    ScheduleError,
    Simulation,
    build,
    check,
    default_virtual_stages,
    load_csv,
    simulate,
)
from lightning_pipeline.schedules.validation import MAX_TIME, shown


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


@dataclass(frozen=True)
class CostOptions:
    """What a rank's share of the model takes for one micro-batch.

    Attributes:
        forward: one number for all ranks' shares, or one for each of as many equal parts of the model as there are
            ranks, in the order of the data.
        input_grad: likewise, of the gradients of the inputs.
        weight_grad: likewise, of the gradients of the weights.
        transfer: time until a value is on another rank.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: float

    @classmethod
    def parse(cls, forward: str, input_grad: str, weight_grad: str, transfer: float) -> CostOptions:
        """Read the options.

        Raises:
            CommandError: for anything but a number of 0 or more, or several with commas between.
        """
        if not 0 <= transfer <= MAX_TIME:
            raise CommandError(f"--transfer takes a time from 0 to {MAX_TIME:g}, got {transfer}")
        return cls(
            _numbers("--forward", forward),
            _numbers("--input-grad", input_grad),
            _numbers("--weight-grad", weight_grad),
            transfer,
        )

    def __str__(self) -> str:
        times = (("forward", self.forward), ("input grad", self.input_grad), ("weight grad", self.weight_grad))
        listed = [f"{name} {','.join(f'{number:g}' for number in numbers)}" for name, numbers in times]
        return ", ".join([*listed, f"transfer {self.transfer:g}"])

    def simulate(self, schedule: Schedule) -> Simulation:
        """Simulate a schedule whose virtual stages share these costs out.

        Raises:
            CommandError: if a list has not one number for each rank.
            ScheduleError: if the schedule deadlocks.
        """
        return simulate(
            schedule,
            forward=_by_stage("--forward", self.forward, schedule),
            input_grad=_by_stage("--input-grad", self.input_grad, schedule),
            weight_grad=_by_stage("--weight-grad", self.weight_grad, schedule),
            transfer=self.transfer,
        )


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number <= MAX_TIME for number in numbers):
        raise CommandError(
            f"{option} takes a time of 0 or more, or several such as 1,1,2, got {shown(text)} (at most {MAX_TIME:g})"
        )
    return numbers


def _by_stage(option: str, numbers: tuple[float, ...], schedule: Schedule) -> list[float]:
    num_ranks, num_stages = schedule.num_ranks, schedule.num_stages
    if len(numbers) == 1:
        numbers *= num_ranks
    if len(numbers) != num_ranks:
        raise CommandError(
            f"{option} has {len(numbers)} times, but {schedule.name} has {num_ranks} ranks; give one, or one for each"
        )
    return [numbers[stage * num_ranks // num_stages] * num_ranks / num_stages for stage in range(num_stages)]
