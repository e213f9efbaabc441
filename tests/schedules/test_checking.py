"""The check finds each kind of fault, says it in a sentence and marks the cell."""

from textwrap import dedent

import pytest

from lightning_pipeline.schedules import Action, Schedule, ScheduleError, build, check, forward_only, lower

GOOD = "0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1"
SPLIT = "0F0 0F1 0I0 0W0 0I1 0W1 / 1F0 1I0 1F1 1I1 1W0 1W1"
LOWERED = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 / 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def schedule(text: str, *, placement: tuple[int, ...] = (0, 1), lowered: bool = False) -> Schedule:
    orders = tuple(tuple(map(Action.parse, row.split())) for row in text.split("/"))
    return Schedule("mine", orders, num_microbatches=2, placement=placement, lowered=lowered)


def fault(bad: Schedule) -> str:
    with pytest.raises(ScheduleError) as error:
        check(bad)
    return str(error.value)


@pytest.mark.parametrize("text", [GOOD, SPLIT, "0F0 0F1 0I0 0W0 0B1 / 1F0 1F1 1B0 1I1 1W1", "0F0 0F1 / 1F1 1F0"])
def test_good(text: str) -> None:
    check(schedule(text))
    check(lower(schedule(text)))


def test_good_by_hand() -> None:
    check(schedule(LOWERED, lowered=True))


def test_message_is_a_sentence_and_the_marked_grid() -> None:
    message = fault(schedule("0F0 0F1 0B0 0B1 / 1F0 1B0 1B1 1F1"))
    assert (
        message
        == dedent(
            """
            schedule 'mine': 1B1 runs before 1F1, which it needs
            rank 0  0F0 0F1  0B0  0B1
            rank 1  1F0 1B0 >1B1< 1F1
            """
        ).strip()
    )


@pytest.mark.parametrize(
    ("text", "sentence", "mark"),
    [
        ("0F0 0F1 0B0 0B1 / 1F0 1B0 1B1", "rank 1 lacks 1F1", ">1F1<"),
        ("0F0 0F1 0B0 / 1F0 1B0 1F1 1B1", "rank 0 lacks 0B1", ">0B1<"),
        ("0F0 0F1 0I0 0W0 0I1 / 1F0 1B0 1F1 1B1", "rank 0 lacks 0W1", ">0W1<"),
        ("0F0 0F1 0W0 0I1 0W1 / 1F0 1B0 1F1 1B1", "rank 0 lacks 0I0", ">0I0<"),
        ("0F0 0F1 0I0 0I1 0W1 / 1F0 1B0 1F1 1B1", "rank 0 lacks 0W0", ">0W0<"),
        ("0F0 0F1 / 1F0 1B0 1F1 1B1", "rank 0 lacks 0B0", ">0B0<"),
        ("0F0 0F1 / 1F0", "rank 1 lacks 1F1", ">1F1<"),
        ("0F0 0F1 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1", "0F1 runs twice", ">0F1<"),
        ("0F0 0F1 0B0 0W0 0B1 / 1F0 1B0 1F1 1B1", "0W0 repeats a part of 0B0", ">0W0<"),
        ("0F0 0F1 0I0 0B0 0B1 / 1F0 1B0 1F1 1B1", "0B0 repeats a part of 0I0", ">0B0<"),
        ("0F0 0F1 0B0 0I0 0B1 / 1F0 1B0 1F1 1B1", "0I0 repeats a part of 0B0", ">0I0<"),
        ("0F0 0F1 0I0 0I1 0W0 0B1 / 1F0 1B0 1F1 1B1", "0B1 repeats a part of 0I1", ">0B1<"),
        ("0F0 0F1 0I0 0W0 0I1 0W0 0W1 / 1F0 1B0 1F1 1B1", "0W0 runs twice", ">0W0<"),
        ("0F0 0F1 0B0 0B1 1F1 / 1F0 1B0 1B1", "1F1 is on rank 0, but stage 1 is on rank 1", ">1F1<"),
        ("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1 2F0", "2F0 is of stage 2, but the last stage is 1", ">2F0<"),
        ("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1 1F2", "1F2 is of micro-batch 2, but the last micro-batch is 1", ">1F2<"),
        ("0F0 0F1 0B0 0SEND_F0 0B1 / 1F0 1B0 1F1 1B1", "0SEND_F0 is communication", ">0SEND_F0<"),
        ("0F0 0B0 0F1 0B1 / 1B0 1F0 1F1 1B1", "1B0 runs before 1F0", ">1B0<"),
        ("0F0 0F1 0W0 0I0 0B1 / 1F0 1B0 1F1 1B1", "0W0 runs before 0I0", ">0W0<"),
        ("0F0 0F1 0B1 0B0 / 1F0 1F1 1B0 1B1", "0B0 adds to the gradients of stage 0 after micro-batch 1", ">0B0<"),
        ("0F0 0F1 0I0 0I1 0W1 0W0 / 1F0 1F1 1B0 1B1", "micro-batches must ascend", ">0W0<"),
        ("0F0 0F1 0I0 0B1 0W0 / 1F0 1F1 1B0 1B1", "0W0 adds to the gradients of stage 0 after micro-batch 1", ">0W0<"),
        ("0F0 0F1 0B0 0B1 / 1I0 1F0 1W0 1F1 1B1", "1I0 runs before 1F0", ">1I0<"),
        ("0F0 0B0 0F1 0B1 / 1F0 1F1 1B0 1B1", "rank 0 waits in 0B0 for 1B0; rank 1 waits in 1F1 for 0F1", ">0B0<"),
        ("0F0 0B0 0F1 0B1 / 1F0 1F1 1I0 1W0 1B1", "rank 0 waits in 0B0 for 1I0", ">1F1<"),
    ],
)
def test_fault(text: str, sentence: str, mark: str) -> None:
    message = fault(schedule(text))
    assert sentence in message.splitlines()[0]
    assert mark in message


@pytest.mark.parametrize(
    ("old", "new", "sentence", "mark"),
    [
        ("0SEND_F1 ", "", "rank 0 lacks 0SEND_F1", ">0SEND_F1<"),
        ("1RECV_F1 ", "", "rank 1 lacks 1RECV_F1", ">1RECV_F1<"),
        ("0SEND_F1", "0SEND_F1 0SEND_F1", "0SEND_F1 is done twice", ">0SEND_F1<"),
        ("0RECV_B0", "1RECV_B0", "1RECV_B0 belongs to no transfer", ">1RECV_B0<"),
        ("1SEND_B1", "0RECV_B1", "0RECV_B1 is on rank 1, but stage 0 is on rank 0", ">0RECV_B1<"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 comes before 0F0, whose value it sends", ">0SEND_F0<"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", "1F0 runs before 1RECV_F0, which it needs", ">1F0<"),
        ("0RECV_B1 0B1", "0B1 0RECV_B1", "0B1 runs before 0RECV_B1, which it needs", ">0B1<"),
        # Both ranks send first and would wait in it for ever.
        (
            "1F0 1RECV_F1 1B0 1SEND_B0 1F1",
            "1F0 1B0 1SEND_B0 1RECV_F1 1F1",
            "deadlock where sends block, rank 0 waits in 0SEND_F1; rank 1 waits in 1SEND_B0",
            ">1SEND_B0<",
        ),
    ],
)
def test_fault_in_communication(old: str, new: str, sentence: str, mark: str) -> None:
    assert old in LOWERED
    message = fault(schedule(LOWERED.replace(old, new), lowered=True))
    assert sentence in message.splitlines()[0]
    assert mark in message


def test_wide_grid_is_cut_around_the_mark() -> None:
    good = build("1f1b", 2, 40)
    orders = [list(order) for order in good]
    orders[1][60], orders[1][61] = orders[1][61], orders[1][60]
    message = fault(Schedule("wide", tuple(map(tuple, orders)), 40, good.placement))
    assert ">1B30<" in message
    assert max(map(len, message.splitlines())) < 160
    assert message.splitlines()[2].startswith("rank 1  ... ")
    assert message.splitlines()[2].endswith(" ...")


def test_forward_only_needs_no_backward() -> None:
    check(forward_only(3, 2))
