"""Drawings show time; the schedules' own are in test_builders.py."""

from textwrap import dedent

import pytest

from lightning_pipeline.schedules import Action, Kind, Schedule, ScheduleError, build, lower, render


def test_whole_backwards_take_two_slots_beside_split_ones() -> None:
    rows = ("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1B1 1W0")
    orders = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    assert (
        render(Schedule("split", orders, num_microbatches=2, placement=(0, 1)))
        == dedent(
            """
            rank 0  0F0 0F1  .  0I0 0W0  .  0B1 0B1
            rank 1   .  1F0 1I0 1F1 1B1 1B1 1W0
            """
        ).strip()
    )


def test_dots_are_the_bubble() -> None:
    drawing = render(build("1f1b", 4, 8))
    columns = max(len(line.split()) - 2 for line in drawing.splitlines())
    busy = sum(cell != "." for line in drawing.splitlines() for cell in line.split()[2:])
    assert 1 - busy / (4 * columns) == pytest.approx(3 / 11)


def test_lowered_draws_the_same() -> None:
    assert render(lower(build("1f1b", 3, 4))) == render(build("1f1b", 3, 4))


def test_deadlock_cannot_be_drawn() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        render(Schedule("bad", ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)),), num_microbatches=1, placement=(0,)))
