"""Each builder of split backwards's order is its drawing."""

import re
from collections.abc import Callable
from itertools import pairwise
from textwrap import dedent

import pytest

from lightning_pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    dualpipe_v,
    interleaved_1f1b_low_memory,
    interleaved_zero_bubble,
    render,
    simulate,
    v_half,
    v_min,
    zbv,
    zero_bubble,
    zero_bubble_h2,
)

ZERO_BUBBLE_2X4 = """
    rank 0  0F0 0F1  .  0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
    rank 1   .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
"""
ZERO_BUBBLE_4X8 = """
    rank 0  0F0 0F1 0F2 0F3  .   .   .  0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
    rank 1   .  1F0 1F1 1F2  .   .  1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4 1I6 1W5 1I7 1W6 1W7
    rank 2   .   .  2F0 2F1  .  2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4 2I7 2W5 2W6 2W7
    rank 3   .   .   .  3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 3W5 3W6 3W7
"""
INTERLEAVED_2X4 = """
    rank 0  0F0 0F1 2F0 2F1  .  2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    rank 1   .  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3
"""
INTERLEAVED_2X3 = """
    rank 0  0F0 0F1 0F2 2F0 2F1  .  2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1   .  1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2
"""
ZBV_2X4 = """
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 1W3 2W3
"""
ZBV_2X2 = """
    rank 0  0F0 0F1  .  3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0  .  0I1 0W1
    rank 1   .  1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1
"""
H2_2X4 = """
    rank 0  0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   .  1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
"""
H2_3X5 = """
    rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
    rank 1   .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
"""
V_HALF_3X3 = """
    rank 0  0F0 0F1  .   .   .  5F0 5I0 0F2 5W0 5F1 5I1 5W1 0I0 0W0  .  5F2 5I2 0I1 5W2 0W1  .  0I2 0W2
    rank 1   .  1F0  .   .  4F0 1F1  .  4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
    rank 2   .   .  2F0 3F0  .   .  2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
"""
V_MIN_3X2 = """
    rank 0  0F0  .   .   .   .  5F0 0F1 5I0 5W0  .   .  5F1  .  0I0 5I1 0W0 5W1  .   .  0I1 0W1
    rank 1   .  1F0  .   .  4F0  .   .  1F1 4I0 4W0 4F1  .  1I0 1W0  .  4I1 4W1  .  1I1 1W1
    rank 2   .   .  2F0 3F0  .   .   .   .  2F1 3F1 3I0 2I0 3W0 2W0  .   .  3I1 2I1 3W1 2W1
"""
DUALPIPE_V_2X4 = """
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3  .  0B1 0B1 3B3 3B3 0I2 0W2 0I3 0W3
    rank 1   .  1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2I3 1I3 2W3 1W3
"""
# Columns carry no time below; a and b are the first and second virtual stage of a rank.
ZBV_4X8 = """
r0 F0a F1a F2a F3a F4a F5a F6a F0b I0b W0b F1b I1b W1b F2b I2b W2b F3b I3b W3b F7a I0a W0a F4b I4b W4b I1a W1a F5b I5b W5b I2a W2a F6b I6b W6b I3a W3a F7b I7b W7b I4a W4a I5a W5a I6a W6a I7a W7a
r1 F0a F1a F2a F3a F4a F0b F5a F1b I0b W0b F2b I1b W1b F3b I2b W2b F6a I0a W0a F4b I3b W3b F7a I1a W1a F5b I4b W4b I2a W2a F6b I5b W5b I3a W3a F7b I6b W6b I4a I7b I5a W4a I6a W5a I7a W6a W7a W7b
r2 F0a F1a F2a F0b F3a F1b F4a F2b I0b W0b F3b I1b W1b F5a I0a W0a F4b I2b W2b F6a I1a W1a F5b I3b W3b F7a I2a W2a F6b I4b W4b I3a W3a F7b I5b W5b I4a I6b I5a I7b I6a W4a I7a W5a W6a W7a W6b W7b
r3 F0a F0b F1a F1b F2a F2b F3a F3b I0b W0b F4a I0a W0a F4b I1b W1b F5a I1a W1a F5b I2b W2b F6a I2a W2a F6b I3b W3b F7a I3a W3a F7b I4b W4b I4a I5b I5a I6b I6a I7b I7a W4a W5a W6a W7a W5b W6b W7b
"""  # noqa: E501
INTERLEAVED_4X8 = """
r0 F0a F1a F2a F3a F0b F1b F2b F3b I0b W0b F4a I1b W1b F5a I2b W2b F6a I3b W3b F7a I0a W0a F4b I1a W1a F5b I2a W2a F6b I3a W3a F7b I4b W4b I5b W5b I6b W6b I7b W7b I4a W4a I5a W5a I6a W6a I7a W7a
r1 F0a F1a F2a F3a F0b F1b F2b I0b F3b I1b W0b F4a I2b W1b F5a I3b W2b F6a I0a W3b F7a I1a W0a F4b I2a W1a F5b I3a W2a F6b I4b W3a F7b I5b W4b I6b W5b I7b W6b I4a W7b I5a W4a I6a W5a I7a W6a W7a
r2 F0a F1a F2a F3a F0b F1b I0b F2b I1b F3b I2b W0b F4a I3b W1b F5a I0a W2b F6a I1a W3b F7a I2a W0a F4b I3a W1a F5b I4b W2a F6b I5b W3a F7b I6b W4b I7b W5b I4a W6b I5a W7b I6a W4a I7a W5a W6a W7a
r3 F0a F1a F2a F3a F0b I0b F1b I1b F2b I2b F3b I3b W0b F4a I0a W1b F5a I1a W2b F6a I2a W3b F7a I3a W0a F4b I4b W1a F5b I5b W2a F6b I6b W3a F7b I7b W4b I4a W5b I5a W6b I6a W7b I7a W4a W5a W6a W7a
"""  # noqa: E501


@pytest.mark.parametrize(
    ("schedule", "drawing"),
    [
        (zero_bubble(2, 4), ZERO_BUBBLE_2X4),
        (zero_bubble(4, 8), ZERO_BUBBLE_4X8),
        (interleaved_zero_bubble(2, 4, 2), INTERLEAVED_2X4),
        (interleaved_zero_bubble(2, 3, 2), INTERLEAVED_2X3),
        (zbv(2, 4), ZBV_2X4),
        (zbv(2, 2), ZBV_2X2),
        (zero_bubble_h2(2, 4), H2_2X4),
        (zero_bubble_h2(3, 5), H2_3X5),
        (v_half(3, 3), V_HALF_3X3),
        (v_min(3, 2), V_MIN_3X2),
        (dualpipe_v(2, 4), DUALPIPE_V_2X4),
    ],
    ids=str,
)
def test_drawing(schedule: Schedule, drawing: str) -> None:
    assert render(schedule) == dedent(drawing).strip()


@pytest.mark.parametrize(
    ("builder", "drawing"),
    [
        (zero_bubble, ZERO_BUBBLE_2X4),
        (zero_bubble_h2, H2_2X4),
        (interleaved_zero_bubble, INTERLEAVED_2X4),
        (zbv, ZBV_2X4),
        (v_half, V_HALF_3X3),
        (v_min, V_MIN_3X2),
        (dualpipe_v, DUALPIPE_V_2X4),
    ],
)
def test_docstring_shows_the_drawing(builder: object, drawing: str) -> None:
    assert drawing.strip() in re.sub(r"\n +", "\n    ", builder.__doc__ or "")


@pytest.mark.parametrize(
    ("schedule", "grid"),
    [(zbv(4, 8), ZBV_4X8), (interleaved_zero_bubble(4, 8, 2), INTERLEAVED_4X8)],
    ids=str,
)
def test_grid(schedule: Schedule, grid: str) -> None:
    rows = [line.split()[1:] for line in grid.strip().splitlines()]
    expected = [
        [Action(Kind(cell[0]), schedule.stages_on(rank)["ab".index(cell[2])], int(cell[1])) for cell in row]
        for rank, row in enumerate(rows)
    ]
    assert list(schedule) == expected


def test_zbv_is_a_v() -> None:
    assert zbv(4, 8).placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert zbv(1, 1).placement == (0, 0)


@pytest.mark.parametrize("counts", [(2, 4, 1), (4, 6, 2), (3, 7, 3)])
def test_is_low_memory_interleaved_but_for_the_weights(counts: tuple[int, int, int]) -> None:
    for split, whole in zip(interleaved_zero_bubble(*counts), interleaved_1f1b_low_memory(*counts), strict=True):
        without_weights = [str(action).replace("I", "B") for action in split if action.kind is not Kind.W]
        assert without_weights == [str(action) for action in whole]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 7), (4, 8), (8, 20)])
def test_zbv_waits_only_at_its_ends(p: int, m: int) -> None:
    for rank, spans in enumerate(simulate(zbv(p, m)).spans):
        assert spans[0].start == rank
        assert all(before.end == after.start for before, after in pairwise(spans))


@pytest.mark.parametrize("builder", [zero_bubble, zero_bubble_h2])
def test_zero_bubble_takes_one_virtual_stage(builder: Callable[..., Schedule]) -> None:
    with pytest.raises(ScheduleError, match="num_virtual_stages=2; for several use interleaved_zero_bubble"):
        builder(2, 4, 2)


@pytest.mark.parametrize("v", [1, 3])
@pytest.mark.parametrize("builder", [zbv, v_half, v_min, dualpipe_v])
def test_a_v_takes_two_virtual_stages(builder: Callable[..., Schedule], v: int) -> None:
    with pytest.raises(ScheduleError, match=f"num_virtual_stages={v}; use num_virtual_stages=2, or zero_bubble"):
        builder(2, 4, v)


@pytest.mark.parametrize("counts", [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
@pytest.mark.parametrize("builder", [zero_bubble, zero_bubble_h2, interleaved_zero_bubble, zbv, v_half, dualpipe_v])
def test_counts_below_one(builder: object, counts: tuple[int, int, int]) -> None:
    counts = (*counts[:2], min(counts[2], 1)) if builder in (zero_bubble, zero_bubble_h2) else counts
    with pytest.raises(ScheduleError, match="at least one rank, micro-batch and virtual stage"):
        builder(*counts)  # type: ignore[operator]
