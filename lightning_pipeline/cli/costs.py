"""Costs as they are typed, and as each virtual stage has them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipeline.cli.errors import CommandError
from lightning_pipeline.schedules import Schedule, Simulation, simulate
from lightning_pipeline.schedules.errors import shown
from lightning_pipeline.schedules.limits import MAX_TIME


@dataclass(frozen=True)
class Costs:
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
    def parse(cls, forward: str, input_grad: str, weight_grad: str, transfer: float) -> Costs:
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
