"""Who takes part: one process, and for each schedule torch.distributed.pipelining and PipelineStrategy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from lightning_pipeline.schedules import default_virtual_stages, placement_of

LEARNING_RATE = 0.01

TORCH_SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",  # with one stage a rank its order is the same, action by action
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
"""The class of torch.distributed.pipelining that runs each schedule."""


class Unavailable(Exception):
    """A contender cannot run this; the message says why."""


@dataclass(frozen=True)
class Contender:
    """``who`` is "one process", "lightning" (alone, in one process), "torch" or "ours"; the last two run a schedule."""

    who: str
    schedule: str | None = None

    @property
    def name(self) -> str:
        """As tables call it: "ours 1f1b"."""
        return self.who if self.schedule is None else f"{self.who} {self.schedule}"

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """For each stage, counted along the data, its rank; two stages a rank for schedules that interleave."""
        if self.schedule is None:
            return (0,)
        return placement_of(self.schedule, num_ranks, default_virtual_stages(self.schedule))


@dataclass(frozen=True)
class Plan:
    """What a contender is to do with a workload. ``placement`` has the rank of each stage of the workload."""

    schedule: str
    placement: tuple[int, ...]
    num_microbatches: int
    num_steps: int
    num_replicas: int = 1


@dataclass
class Measured:
    """Seconds from the start of a step to the start of the next, and the last step's loss (where the last stage is)."""

    seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")


def line_up(schedules: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """The contenders in the order of their turns, and for those that do not exist the reason."""
    contenders, absent = [Contender("one process")], {}
    for schedule in schedules:
        if schedule in TORCH_SCHEDULES:
            contenders.append(Contender("torch", schedule))
        else:
            absent[f"torch {schedule}"] = "torch.distributed.pipelining has no such schedule"
        contenders.append(Contender("ours", schedule))
    return contenders, absent


def intervals(times: list[float]) -> list[float]:
    """Time from each entry to the next."""
    return [end - start for start, end in itertools.pairwise(times)]
