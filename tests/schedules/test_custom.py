"""What users write is read, placed and refused."""

import pytest

from lightning_pipeline.schedules import Action, ScheduleError, as_schedule, build, check

ROWS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def test_text() -> None:
    schedule = as_schedule(ROWS, name="mine", num_microbatches=2)
    assert schedule == build("1f1b", 2, 2)
    assert schedule.name == "mine"
    check(schedule)


def test_actions_tuples_and_idle_time() -> None:
    rows = (tuple(build("1f1b", 2, 2)[0]), (None, "1F0", "", Action.parse("1B0"), None, " 1F1 ", "1B1", None))
    assert as_schedule(rows, name="mine", num_microbatches=2) == build("1f1b", 2, 2)


def test_lists_of_a_schedule() -> None:
    schedule = build("zbv", 3, 6, 2)
    again = as_schedule(list(schedule), name="mine", num_microbatches=6)
    assert again == schedule
    assert again.placement == (0, 1, 2, 2, 1, 0)


def test_a_schedule_stays_what_it_is() -> None:
    schedule = build("1f1b", 2, 4)
    assert as_schedule(schedule, name="mine", num_microbatches=4) is schedule
    with pytest.raises(ScheduleError, match="'mine' is for 4 micro-batches, but a step has 6; build it for 6"):
        as_schedule(schedule, name="mine", num_microbatches=6)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, r"'mine' must be a Schedule, or one list for each rank .*, got None"),
        ("0F0 0B0", r"must be a Schedule, .*, got '0F0 0B0'"),
        (["0F0", "0B0"], r"must be a Schedule, .*, got \['0F0', '0B0'\]"),
        ({0: ["0F0"]}, r"must be a Schedule, .*, got \{0"),
        ([], r"'mine' holds no actions"),
        ([[], [None]], r"'mine' holds no actions"),
        ([["0F0"], ["1F0", "oops"]], r"'mine', rank 1, position 1: cannot read the action 'oops'"),
        ([["0F0", 3]], r"'mine', rank 0, position 1: expected an Action or text such as '0F0', got 3"),
        ([["0F0", "0SEND_F0"], ["1F0"]], r"rank 0, position 1: 0SEND_F0 is communication; write compute actions only"),
        ([["0F0"], ["2F0"]], r"'mine' has no action of stage 1, but of stage 2"),
    ],
)
def test_refused(value: object, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        as_schedule(value, name="mine", num_microbatches=1)  # type: ignore[arg-type]


def test_faults_are_left_to_the_check() -> None:
    schedule = as_schedule(ROWS, name="mine", num_microbatches=3)
    with pytest.raises(ScheduleError, match="rank 0 lacks 0F2"):
        check(schedule)
