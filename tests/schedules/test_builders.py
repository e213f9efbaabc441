"""Each builder's order is its drawing."""

import re
from textwrap import dedent

import pytest

from lightning_pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    build,
    check,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_1f1b_low_memory,
    one_f_one_b,
    render,
    simulate,
)

GPIPE_2X4 = """
    rank 0  0F0 0F1 0F2 0F3  .   .  0B0 0B1 0B2 0B3
    rank 1   .  1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
"""
GPIPE_4X4 = """
    rank 0  0F0 0F1 0F2 0F3  .   .   .   .   .   .  0B0 0B1 0B2 0B3
    rank 1   .  1F0 1F1 1F2 1F3  .   .   .   .  1B0 1B1 1B2 1B3
    rank 2   .   .  2F0 2F1 2F2 2F3  .   .  2B0 2B1 2B2 2B3
    rank 3   .   .   .  3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3
"""
GPIPE_2X3_TWO_VIRTUAL_STAGES = """
    rank 0  0F0 0F1 0F2 2F0 2F1 2F2  .   .  2B0 2B1 2B2 0B0 0B1 0B2
    rank 1   .  1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
"""
ONE_F_ONE_B_2X4 = """
    rank 0  0F0 0F1  .  0B0 0F2 0B1 0F3 0B2  .  0B3
    rank 1   .  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""
ONE_F_ONE_B_4X8 = """
    rank 0  0F0 0F1 0F2 0F3  .   .   .  0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4  .  0B5  .  0B6  .  0B7
    rank 1   .  1F0 1F1 1F2  .   .  1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5  .  1B6  .  1B7
    rank 2   .   .  2F0 2F1  .  2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6  .  2B7
    rank 3   .   .   .  3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
"""
FORWARD_2X4 = """
    rank 0  0F0 0F1 0F2 0F3
    rank 1   .  1F0 1F1 1F2 1F3
"""
FORWARD_V_2X2 = """
    rank 0  0F0 0F1  .  3F0  .  3F1
    rank 1   .  1F0 2F0 1F1 2F1
"""
FORWARD_4X2 = """
    rank 0  0F0 0F1
    rank 1   .  1F0 1F1
    rank 2   .   .  2F0 2F1
    rank 3   .   .   .  3F0 3F1
"""
INTERLEAVED_2X4 = """
    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
    rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""
LOW_MEMORY_2X4 = """
    rank 0  0F0 0F1 2F0 2F1  .  2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2  .  2B3 0B2 0B3
    rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""
# Columns carry no time here; a and b are the first and second virtual stage of a rank.
LOW_MEMORY_4X8 = """
r0 F0a F1a F2a F3a F0b F1b F2b F3b B0b F4a B1b F5a B2b F6a B3b F7a B0a F4b B1a F5b B2a F6b B3a F7b B4b B5b B6b B7b B4a B5a B6a B7a
r1 F0a F1a F2a F3a F0b F1b F2b B0b F3b B1b F4a B2b F5a B3b F6a B0a F7a B1a F4b B2a F5b B3a F6b B4b F7b B5b B6b B7b B4a B5a B6a B7a
r2 F0a F1a F2a F3a F0b F1b B0b F2b B1b F3b B2b F4a B3b F5a B0a F6a B1a F7a B2a F4b B3a F5b B4b F6b B5b F7b B6b B7b B4a B5a B6a B7a
r3 F0a F1a F2a F3a F0b B0b F1b B1b F2b B2b F3b B3b F4a B0a F5a B1a F6a B2a F7a B3a F4b B4b F5b B5b F6b B6b F7b B7b B4a B5a B6a B7a
"""  # noqa: E501
INTERLEAVED_4X8 = """
r0 F0a F1a F2a F3a F0b F1b F2b F3b F4a F5a F6a B0b F7a B1b F4b B2b F5b B3b F6b B0a F7b B1a B2a B3a B4b B5b B6b B7b B4a B5a B6a B7a
r1 F0a F1a F2a F3a F0b F1b F2b F3b F4a B0b F5a B1b F6a B2b F7a B3b F4b B0a F5b B1a F6b B2a F7b B3a B4b B5b B6b B7b B4a B5a B6a B7a
r2 F0a F1a F2a F3a F0b F1b F2b B0b F3b B1b F4a B2b F5a B3b F6a B0a F7a B1a F4b B2a F5b B3a F6b B4b F7b B5b B6b B7b B4a B5a B6a B7a
r3 F0a F1a F2a F3a F0b B0b F1b B1b F2b B2b F3b B3b F4a B0a F5a B1a F6a B2a F7a B3a F4b B4b F5b B5b F6b B6b F7b B7b B4a B5a B6a B7a
"""  # noqa: E501


@pytest.mark.parametrize(
    ("schedule", "drawing"),
    [
        (gpipe(2, 4), GPIPE_2X4),
        (gpipe(4, 4), GPIPE_4X4),
        (gpipe(2, 3, 2), GPIPE_2X3_TWO_VIRTUAL_STAGES),
        (one_f_one_b(2, 4), ONE_F_ONE_B_2X4),
        (one_f_one_b(4, 8), ONE_F_ONE_B_4X8),
        (forward_only(2, 4), FORWARD_2X4),
        (forward_only(4, 2), FORWARD_4X2),
        (interleaved_1f1b(2, 4, 2), INTERLEAVED_2X4),
        (interleaved_1f1b_low_memory(2, 4, 2), LOW_MEMORY_2X4),
    ],
    ids=str,
)
def test_drawing(schedule: Schedule, drawing: str) -> None:
    assert render(schedule) == dedent(drawing).strip()


@pytest.mark.parametrize(
    ("builder", "drawing"),
    [
        (gpipe, GPIPE_2X4),
        (one_f_one_b, ONE_F_ONE_B_2X4),
        (forward_only, FORWARD_2X4),
        (interleaved_1f1b, INTERLEAVED_2X4),
        (interleaved_1f1b_low_memory, LOW_MEMORY_2X4),
    ],
)
def test_docstring_shows_the_drawing(builder: object, drawing: str) -> None:
    assert drawing.strip() in re.sub(r"\n +", "\n    ", builder.__doc__ or "")


@pytest.mark.parametrize(
    ("schedule", "grid"),
    [(interleaved_1f1b_low_memory(4, 8, 2), LOW_MEMORY_4X8), (interleaved_1f1b(4, 8, 2), INTERLEAVED_4X8)],
    ids=["low_memory", "interleaved"],
)
def test_interleaved_grid(schedule: Schedule, grid: str) -> None:
    rows = [line.split()[1:] for line in grid.strip().splitlines()]
    expected = [
        [Action(Kind(cell[0]), rank + 4 * "ab".index(cell[2]), int(cell[1])) for cell in row]
        for rank, row in enumerate(rows)
    ]
    assert list(schedule) == expected


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 2), (3, 7), (8, 9), (4, 2)])
def test_low_memory_with_one_virtual_stage_is_1f1b(num_ranks: int, num_microbatches: int) -> None:
    assert interleaved_1f1b_low_memory(num_ranks, num_microbatches) == one_f_one_b(num_ranks, num_microbatches)


def test_one_rank_does_one_after_the_other() -> None:
    assert [str(action) for action in build("1f1b", 1, 2)[0]] == ["0F0", "0B0", "0F1", "0B1"]


@pytest.mark.parametrize("counts", [(0, 4, 1), (2, 0, 1), (2, 4, 0), (-1, 4, 1)])
def test_counts_below_one(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ScheduleError, match=f"num_virtual_stages={counts[2]}"):
        build("gpipe", *counts)


def test_1f1b_takes_one_virtual_stage() -> None:
    with pytest.raises(ScheduleError, match="num_virtual_stages=2; for several use interleaved_1f1b"):
        build("1f1b", 2, 4, num_virtual_stages=2)


def test_forward_in_a_v() -> None:
    schedule = forward_only(2, 2, placement=[0, 1, 1, 0])
    assert render(schedule) == dedent(FORWARD_V_2X2).strip()
    assert FORWARD_V_2X2.strip() in re.sub(r"\n +", "\n    ", forward_only.__doc__ or "")
    assert schedule.placement == (0, 1, 1, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 13])
def test_forward_in_a_v_takes_no_longer_than_it_must(num_ranks: int, num_microbatches: int) -> None:
    """The last rank starts after the others, does two virtual stages, and the others finish after it."""
    placement = (*range(num_ranks), *reversed(range(num_ranks)))
    schedule = forward_only(num_ranks, num_microbatches, placement=placement)
    check(schedule)
    assert simulate(schedule).makespan == 2 * (num_microbatches + num_ranks - 1)


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 0, 0, 1), (1, 0), (0, 1, 2, 1, 0), (2, 2, 1, 1, 0, 0)])
def test_forward_on_any_placement(placement: tuple[int, ...]) -> None:
    schedule = forward_only(1 + max(placement), 5, placement=placement)
    check(schedule)
    assert schedule.placement == placement


def test_forward_passes_on_at_once_what_neighbours_on_a_rank_do() -> None:
    assert simulate(forward_only(2, 4, placement=(0, 0, 1, 1))).makespan == 2 * (4 + 1)


def test_forward_on_a_rank_that_is_not_there() -> None:
    with pytest.raises(ScheduleError, match=r"placement names rank 2, but there are 2 ranks, got \(0, 1, 2\)"):
        forward_only(2, 4, placement=(0, 1, 2))
