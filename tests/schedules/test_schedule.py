"""A schedule is a value: it iterates, compares and prints."""

import pickle
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
    lower,
    simulate,
)


def test_iterates_as_one_list_for_each_rank() -> None:
    schedule = build("1f1b", 2, 2)
    assert [[str(action) for action in order] for order in schedule] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]
    assert all(isinstance(order, list) for order in schedule)
    assert len(schedule) == schedule.num_ranks == 2
    assert schedule[1] == list(schedule)[1]


def test_knows_its_counts_and_places() -> None:
    schedule = build("gpipe", 3, 6, num_virtual_stages=2)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches, schedule.num_stages) == ("gpipe", 3, 6, 6)
    assert schedule.placement == (0, 1, 2, 0, 1, 2)
    assert schedule.stages_on(1) == [1, 4]
    assert schedule.has_backward
    assert not forward_only(3, 6).has_backward


def test_peers() -> None:
    schedule = Schedule("v", build("forward", 2, 1).orders, num_microbatches=1, placement=(0, 1, 1, 0))
    ends = ["0SEND_F0", "1RECV_F0", "2SEND_F0", "3RECV_F0", "3SEND_B0", "2RECV_B0", "1SEND_B0", "0RECV_B0"]
    assert [schedule.peer(Action.parse(end)) for end in ends] == [1, 0, 0, 1, 1, 0, 0, 1]
    with pytest.raises(ScheduleError, match="1F0 has no peer"):
        schedule.peer(Action.parse("1F0"))


def test_compares_by_what_it_does() -> None:
    schedule = build("1f1b", 2, 4)
    same = Schedule("another name", schedule.orders, 4, (0, 1))
    assert schedule == same
    assert len({schedule, same}) == 1
    assert schedule != build("gpipe", 2, 4)
    assert schedule != lower(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_cannot_be_changed_through_its_lists() -> None:
    schedule = build("1f1b", 2, 4)
    schedule[0].clear()
    next(iter(schedule)).clear()
    assert schedule == build("1f1b", 2, 4)


def test_prints() -> None:
    assert (
        str(build("1f1b", 2, 2))
        == dedent(
            """
            1f1b: 2 ranks, 2 stages, 2 micro-batches
            rank 0  0F0 0F1 0B0 0B1
            rank 1  1F0 1B0 1F1 1B1
            """
        ).strip()
    )
    assert repr(lower(build("1f1b", 2, 2))) == "<Schedule 1f1b: 2 ranks, 2 stages, 2 micro-batches, lowered>"


def test_labels_of_many_ranks_align() -> None:
    lines = str(forward_only(11, 1)).splitlines()
    assert lines[1] == "rank  0  0F0"
    assert lines[11] == "rank 10  10F0"


def test_stage_on_a_rank_that_is_not_there() -> None:
    with pytest.raises(ScheduleError, match="stage 1 is placed on rank 2, but there are 2 ranks"):
        Schedule("bad", ((Action(Kind.F, 0, 0),), ()), num_microbatches=1, placement=(0, 2))


def test_first_microbatches() -> None:
    part = build("1f1b", 3, 6).take(4)
    assert [str(action) for action in part[1]] == ["1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3"]
    assert (part.num_microbatches, part.placement, part.name) == (4, (0, 1, 2), "1f1b")
    check(part)
    assert part.take(4) == part
    for count in (0, 5):
        with pytest.raises(
            ScheduleError, match=f"'1f1b' has 4 micro-batches; take between 1 and 4 of them, got {count}"
        ):
            part.take(count)


def test_ranks_can_change_places() -> None:
    schedule = build("1f1b", 3, 4)
    moved = schedule.on_ranks({1: 0})
    assert moved.placement == (1, 0, 2)
    assert [moved[1], moved[0], moved[2]] == list(schedule)
    check(moved)
    assert simulate(moved).makespan == simulate(schedule).makespan
    assert build("zbv", 2, 4, 2).on_ranks({3: 1}).placement == (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({1: 3}, r"\(1@3\), and there are ranks 0 to 2"),
        ({0: 1, 2: 1}, r"\(0@1, 2@1\), and '1f1b' needs a rank of its own for each of 0, 1, 2"),
    ],
)
def test_ranks_that_cannot_be_are_told(named: dict[int, int], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        build("1f1b", 3, 4).on_ranks(named)
