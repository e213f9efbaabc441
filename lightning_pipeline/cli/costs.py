"""The options of `simulate` and `draw` that tell what the stages take, and what a search for an order has to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_pipeline.cli.common import CommandError
from lightning_pipeline.schedules import Schedule, Simulation
from lightning_pipeline.schedules import simulate as simulate_schedule
from lightning_pipeline.schedules.validation import MAX_TIME, shown


@dataclass(frozen=True)
class CostOptions:
    """Times of a rank's share of the model for one micro-batch.

    Attributes:
        times: for each of `simulate`'s arguments forward, input_grad and weight_grad one number for all ranks' shares,
            or one for each of as many equal parts of the model as there are ranks, in the order of the data.
        host_transfer: time that what a rank's share of the model keeps of a micro-batch takes there, and back.
    """

    times: dict[str, tuple[float, ...]]
    transfer: float
    offload: float = 0.0
    host_transfer: float = 0.0

    @classmethod
    def parse(
        cls, forward: str, input_grad: str, weight_grad: str, transfer: float, offload: float, host_transfer: float
    ) -> CostOptions:
        """Read the options.

        Raises:
            CommandError: for anything but a number of 0 or more, or several with commas between.
        """
        for option, time in (("--transfer", transfer), ("--host-transfer", host_transfer)):
            if not 0 <= time <= MAX_TIME:
                raise CommandError(f"{option} takes a time from 0 to {MAX_TIME:g}, got {time}")
        if host_transfer and not offload:
            raise CommandError("--host-transfer goes with --offload-activations, the share that goes to host memory")
        texts = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad}
        return cls(
            {name: _numbers(_option(name), text) for name, text in texts.items()}, transfer, offload, host_transfer
        )

    def __str__(self) -> str:
        listed = [
            f"{name.replace('_', ' ')} {','.join(f'{number:g}' for number in numbers)}"
            for name, numbers in self.times.items()
        ]
        host = f"{self.offload:.0%} of activations to host memory in {self.host_transfer:g}"
        return ", ".join([*listed, f"transfer {self.transfer:g}", *([host] if self.offload else [])])

    def simulate(self, schedule: Schedule) -> Simulation:
        """Simulate a schedule whose virtual stages share these costs out."""
        by_stage = self.by_stage(schedule.name, schedule.num_ranks, schedule.num_stages)
        forward, input_grad, weight_grad = by_stage.values()
        to_host = self.offload * self.host_transfer * schedule.num_ranks / schedule.num_stages
        return simulate_schedule(
            schedule, forward, input_grad, weight_grad, self.transfer, offload=self.offload, host_transfer=to_host
        )

    def by_stage(self, schedule: str, num_ranks: int, num_stages: int) -> dict[str, list[float]]:
        """For each of `times` the share of each virtual stage."""
        return {
            name: numbers_by_stage(_option(name), numbers, schedule, num_ranks, num_stages)
            for name, numbers in self.times.items()
        }


def read_bounds(max_live_microbatches: float | None, kept_bytes: str | None, max_bytes: float | None) -> dict[str, Any]:
    """What the search for an order has to keep, as `optimize` takes it; `kept_bytes` has one number or one for each
    rank.

    Raises:
        CommandError: for one of `kept_bytes` and `max_bytes` without the other, or no numbers.
    """
    if (kept_bytes is None) != (max_bytes is None):
        raise CommandError("--kept-bytes and --max-bytes go together: what is kept, and the most of it on a rank")
    kept = None if kept_bytes is None else _numbers("--kept-bytes", kept_bytes)
    return {"max_live_microbatches": max_live_microbatches, "kept_bytes": kept, "max_bytes": max_bytes}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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


def numbers_by_stage(
    option: str, numbers: tuple[float, ...], schedule: str, num_ranks: int, num_stages: int
) -> list[float]:
    """The share of each virtual stage in numbers of ranks' shares."""
    if len(numbers) == 1:
        numbers *= num_ranks
    if len(numbers) != num_ranks:
        raise CommandError(
            f"{option} has {len(numbers)} times, but {schedule} has {num_ranks} ranks; give one, or one for each"
        )
    return [numbers[stage * num_ranks // num_stages] * num_ranks / num_stages for stage in range(num_stages)]
