"""What a rank is said to be at, by the actions that it has run."""

from __future__ import annotations

import pytest

from lightning_pipeline.schedules import Action, build
from lightning_pipeline.schedules.live import at_work
from lightning_pipeline.schedules.lowering import lower

PROGRAM = lower(build("1f1b", 2, 2))
"""0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ... and 1RECV_F0 1F0 1B0 1SEND_B0 ..."""


@pytest.mark.parametrize(
    ("place", "before", "is_waiting", "now", "live"),
    [
        (0, "0F0", False, "computes 0F0", 1),
        (0, "0RECV_B0", True, "waits for 1B0 of rank 5", 2),
        (0, "0SEND_F1", True, "waits until rank 5 takes what 0SEND_F1 sends", 2),
        (0, "0B1", False, "computes 0B1", 1),
        (1, "1F1", True, "waits for 0F1 of rank 3", 0),
        (1, "1SEND_B0", False, "exchanges 1SEND_B0", 0),
        (1, None, True, "waits for another rank at the step's end", 0),
        (1, None, False, "is at the step's end", 0),
    ],
)
def test_what_comes_next_says_whom_it_waits_for(
    place: int, before: str | None, is_waiting: bool, now: str, live: int
) -> None:
    program = PROGRAM[place]
    done = program if before is None else program[: list(program).index(Action.parse(before))]
    assert at_work(program, set(done), [3, 5], is_waiting=is_waiting) == (now, live)
