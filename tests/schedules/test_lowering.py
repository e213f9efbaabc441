"""Lowering adds the sends and receives that are needed, where they cannot deadlock."""

from itertools import pairwise, permutations, product

import pytest

from lightning_pipeline.schedules import Action, Kind, Schedule, ScheduleError, build, check, forward_only, lower

ONE_F_ONE_B_2X3 = """
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2
1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2
"""
FORWARD_3X2 = """
0F0 0SEND_F0 0F1 0SEND_F1
1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 1SEND_F1
2RECV_F0 2F0 2RECV_F1 2F1
"""


def actions(text: str) -> list[list[Action]]:
    return [[Action.parse(cell) for cell in line.split()] for line in text.strip().splitlines()]


def v_schedule() -> Schedule:
    """Two ranks, stages 0 and 3 on the first and 1 and 2 on the second, with split backwards."""
    orders = actions(
        """
        0F0 0F1 3F0 3I0 3W0 3F1 3B1 0I0 0W0 0B1
        1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2B1 1B1
        """
    )
    return Schedule("v", tuple(map(tuple, orders)), num_microbatches=2, placement=(0, 1, 1, 0))


@pytest.mark.parametrize(
    ("schedule", "orders"),
    [(build("1f1b", 2, 3), ONE_F_ONE_B_2X3), (forward_only(3, 2), FORWARD_3X2)],
    ids=["1f1b", "forward"],
)
def test_golden(schedule: Schedule, orders: str) -> None:
    assert list(lower(schedule)) == actions(orders)


def test_is_a_schedule_with_the_same_compute() -> None:
    schedule = build("1f1b", 4, 8)
    lowered = lower(schedule)
    assert lowered.lowered
    assert (lowered.name, lowered.placement) == (schedule.name, schedule.placement)
    assert lowered.compute() == schedule
    assert lower(lowered) is lowered


def test_one_rank_sends_nothing() -> None:
    assert list(lower(build("gpipe", 1, 4, 3))) == list(build("gpipe", 1, 4, 3))


def test_inference_has_no_backward_communication() -> None:
    kinds = {action.kind for order in lower(forward_only(4, 2)) for action in order}
    assert kinds == {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_neighbours_on_one_rank_exchange_nothing() -> None:
    lowered = lower(v_schedule())
    communication = {str(action) for order in lowered for action in order if not action.kind.is_compute}
    steps = ("0SEND_F", "1RECV_F", "2SEND_F", "3RECV_F", "3SEND_B", "2RECV_B", "1SEND_B", "0RECV_B")
    assert communication == {f"{step}{microbatch}" for step, microbatch in product(steps, range(2))}


def test_gradients_are_sent_after_the_input_half() -> None:
    texts = [[str(action) for action in order] for order in lower(v_schedule())]
    assert texts[0].index("3I0") < texts[0].index("3SEND_B0") <= texts[0].index("3W0") + 1
    check(v_schedule())


@pytest.mark.parametrize(
    "name", ["gpipe", "interleaved_1f1b", "interleaved_1f1b_low_memory", "interleaved_zero_bubble", "zbv"]
)
def test_a_peer_receives_in_the_order_of_sending(name: str) -> None:
    """Transports without tags depend on it, whether or not forward and backward traffic share a channel."""
    lowered = lower(build(name, 3, 7, 2))
    stage_sent_to = {Kind.SEND_F: 1, Kind.SEND_B: -1, Kind.RECV_F: 0, Kind.RECV_B: 0}

    def messages(rank: int, peer: int, *kinds: Kind) -> list[tuple[str, int, int]]:
        return [
            (action.kind[-1], action.stage + stage_sent_to[action.kind], action.microbatch)
            for action in lowered[rank]
            if action.kind in kinds and lowered.peer(action) == peer
        ]

    for sender, receiver in permutations(range(3), 2):
        sent = messages(sender, receiver, Kind.SEND_F, Kind.SEND_B)
        assert sent or (name == "zbv" and abs(sender - receiver) > 1)
        assert sent == messages(receiver, sender, Kind.RECV_F, Kind.RECV_B)


def test_stays_near_its_use() -> None:
    """A receive written far ahead would stall a rank that waits for it."""
    for order in lower(build("1f1b", 4, 16)):
        for first, second in pairwise([a for a in order if a.kind is Kind.RECV_F]):
            between = order[order.index(first) : order.index(second)]
            assert any(action.kind is Kind.F for action in between)


def test_cannot_lower_what_deadlocks() -> None:
    orders = (tuple(actions("0B0 0F0")[0]), tuple(actions("1F0 1B0")[0]))
    with pytest.raises(ScheduleError, match=r"rank 0 waits in 0B0 for 0F0; rank 1 waits in 1F0 for 0F0"):
        lower(Schedule("bad", orders, num_microbatches=1, placement=(0, 1)))
