"""Schedules are found by name, and what they need is known before the micro-batches are."""

import pytest

from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    ScheduleError,
    build,
    build_for_batch,
    check,
    default_virtual_stages,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_1f1b_low_memory,
    interleaved_zero_bubble,
    one_f_one_b,
    placement_of,
    v_half,
    v_min,
    zbv,
    zero_bubble,
    zero_bubble_h2,
)

TRAINING = [name for name in SCHEDULE_NAMES if name != "forward"]


def test_build_finds_every_builder() -> None:
    assert build("forward", 4, 2) == forward_only(4, 2)
    assert build("gpipe", 2, 4, num_virtual_stages=2) == gpipe(2, 4, 2)
    assert build("looped_bfs", 2, 4, 2) == gpipe(2, 4, 2)
    assert build("1f1b", 2, 4) == one_f_one_b(2, 4)
    assert build("interleaved_1f1b", 2, 4, 2) == interleaved_1f1b(2, 4, 2)
    assert build("interleaved_1f1b_low_memory", 2, 4, 2) == interleaved_1f1b_low_memory(2, 4, 2)
    assert build("zero_bubble", 2, 4) == zero_bubble(2, 4)
    assert build("interleaved_zero_bubble", 2, 4, 2) == interleaved_zero_bubble(2, 4, 2)
    assert build("zero_bubble_h2", 2, 4) == zero_bubble_h2(2, 4)
    assert build("zbv", 2, 4, 2) == zbv(2, 4)
    assert build("v_half", 2, 4, 2) == v_half(2, 4)
    assert build("v_min", 2, 4, 2) == v_min(2, 4)
    assert build("dualpipe_v", 2, 4, 2) == dualpipe_v(2, 4)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_schedules_are_called_by_the_name_asked_for(name: str) -> None:
    assert build(name, 2, 4, default_virtual_stages(name)).name == name


def test_default_virtual_stages() -> None:
    assert {name for name in SCHEDULE_NAMES if default_virtual_stages(name) == 1} == {
        "forward",
        "gpipe",
        "1f1b",
        "zero_bubble",
        "zero_bubble_h2",
    }
    assert {default_virtual_stages(name) for name in SCHEDULE_NAMES} == {1, 2}


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_placement_is_that_of_the_schedule(name: str) -> None:
    v = default_virtual_stages(name)
    assert placement_of(name, 3, v) == build(name, 3, 7, v).placement


def test_placements() -> None:
    assert placement_of("interleaved_1f1b", 2, 3) == (0, 1, 0, 1, 0, 1)
    for name in ("zbv", "v_half", "v_min", "dualpipe_v"):
        assert placement_of(name, 3, 2) == (0, 1, 2, 2, 1, 0)
    with pytest.raises(ScheduleError, match="1f1b runs one virtual stage on each rank"):
        placement_of("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="zbv runs two virtual stages on each rank"):
        placement_of("zbv", 2, 1)


@pytest.mark.parametrize("call", [lambda name: build(name, 2, 4), default_virtual_stages])
def test_unknown_name(call: object) -> None:
    with pytest.raises(ScheduleError, match=r"unknown schedule '1f1'; did you mean '1f1b'.*gpipe.*zbv"):
        call("1f1")  # type: ignore[operator]


@pytest.mark.parametrize("name", TRAINING)
def test_too_few_microbatches(name: str) -> None:
    with pytest.raises(ValueError, match=r"num_microbatches=3 for 4 ranks; use 4 micro-batches or more"):
        build(name, 4, 3, default_virtual_stages(name))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_smaller_last_batch_runs_on_the_same_placement(name: str, num_ranks: int) -> None:
    v = default_virtual_stages(name)
    for num_microbatches in range(1, num_ranks + 1):
        schedule = build_for_batch(name, num_ranks, num_microbatches, v)
        check(schedule)
        assert schedule.placement == build(name, num_ranks, num_ranks, v).placement
