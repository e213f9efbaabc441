"""Halves of a backward that follow one another become one action."""

from __future__ import annotations

import pytest

from lightning_pipeline.schedules import Kind, as_schedule, build, check, fuse, lower, simulate


def test_only_neighbours_of_one_micro_batch_are_fused() -> None:
    first = ["0F0", "0F1", "0I0", "0F2", "0W0", "0I1", "0W1", "0I2", "0W2"]
    second = ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1", "1F2", "1I2", "1W2"]
    fused = fuse(as_schedule([first, second], name="mine", num_microbatches=3))
    assert [list(map(str, order)) for order in fused] == [
        ["0F0", "0F1", "0I0", "0F2", "0W0", "0B1", "0B2"],
        ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1", "1F2", "1B2"],
    ]


@pytest.mark.parametrize(
    ("name", "v"), [("zero_bubble", 1), ("interleaved_zero_bubble", 2), ("zbv", 2), ("v_half", 2), ("1f1b", 1)]
)
def test_a_fused_schedule_is_sound_and_holds_as_much(name: str, v: int) -> None:
    for num_ranks, num_microbatches in ((2, 4), (4, 8), (4, 11)):
        schedule = build(name, num_ranks, num_microbatches, v)
        fused = fuse(schedule)
        check(lower(fused))
        assert simulate(fused).peak_live == simulate(schedule).peak_live
        assert any(action.kind is Kind.B for order in fused for action in order)
        assert (fused == schedule) is (name == "1f1b")
