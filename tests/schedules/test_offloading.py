"""Which activations wait in host memory, and what that does to memory and time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_pipeline.schedules import Action, Kind, Schedule, ScheduleError, build, default_virtual_stages, simulate
from lightning_pipeline.schedules.offloading import Away, away_in, describe_away
from lightning_pipeline.schedules.simulation import live_activations, peak_bytes
from lightning_pipeline.schedules.waits import live_over_time

NAMES = [
    *("1f1b", "gpipe", "interleaved_1f1b", "interleaved_1f1b_low_memory", "looped_bfs", "zero_bubble"),
    *("zero_bubble_h2", "interleaved_zero_bubble", "zbv", "v_half", "v_min", "dualpipe_v"),
]


def made(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    return build(name, num_ranks, num_microbatches, default_virtual_stages(name))


def live(order: Sequence[Action], away: set[tuple[int, int]]) -> list[int]:
    """How many activations are on the device during each action, counted action by action."""
    made = {(a.stage, a.microbatch): place for place, a in enumerate(order) if a.kind is Kind.F}
    used = {(a.stage, a.microbatch): place for place, a in enumerate(order) if a.kind in (Kind.B, Kind.I)}
    found = []
    here: set[tuple[int, int]] = set()
    for place, action in enumerate(order):
        key = action.stage, action.microbatch
        here.add(key)
        gone = {one for one in here & away if made[one] + 1 < place < used[one] - 1}
        found.append(len(here - gone))
        if action.kind in (Kind.B, Kind.W):
            here.remove(key)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 12)])
def test_sends_what_lowers_the_peak_and_no_more(name: str, num_ranks: int, num_microbatches: int) -> None:
    schedule = made(name, num_ranks, num_microbatches)
    simulated = simulate(schedule, offload=1).peak_live
    for order, peak, plain in zip(schedule.orders, simulated, simulate(schedule).peak_live, strict=True):
        keys = {(one.stage, one.microbatch) for one in away_in(order)}
        every = {(action.stage, action.microbatch) for action in order}
        assert max(live(order, keys)) == peak == max(live(order, every)) <= plain
        assert bool(keys) == (peak < plain)
        for key in keys:  # without any one of them the peak would be higher
            assert max(live(order, keys - {key})) > peak


def test_those_whose_backward_is_farthest_go() -> None:
    order = build("gpipe", 1, 8).orders[0]
    assert away_in(order) == [Away(0, index, index, 8 + index) for index in range(1, 7)]
    assert away_in(build("1f1b", 2, 8).orders[0]) == []  # each is needed again within three actions
    assert away_in(build("forward", 2, 8).orders[0]) == []
    assert away_in(()) == []


def test_bytes() -> None:
    schedule = build("gpipe", 2, 8)
    assert peak_bytes(schedule, [10, 20], sent=[10, 20]) == [30, 60]
    assert peak_bytes(schedule, [10, 20], sent=[5, 0]) == [55, 160]
    assert simulate(schedule, offload=0.5).peak_live == [5.5, 5.5]
    assert live_activations(schedule, 1) == [3, 3]
    lines = live_over_time(simulate(schedule).spans, {0: 10.0, 1: 20.0}, 1)
    assert [(max(count for _, count, _ in line), max(size for *_, size in line)) for line in lines] == [
        (3, 30),
        (3, 60),
    ]
    assert all(line[-1][1:] == (0, 0) for line in lines)


def test_time_that_nothing_hides() -> None:
    schedule = build("gpipe", 2, 8)
    free = simulate(schedule, offload=1)
    assert free.makespan == simulate(schedule).makespan
    assert free.waited_for_host == [0, 0]
    hidden = simulate(schedule, offload=1, host_transfer=1.0)
    assert hidden.makespan == free.makespan
    # Forwards take one unit and transfers three: a rank waits for its second forward's transfer before it frees that
    # memory for the fourth one.
    slow = simulate(schedule, offload=1, host_transfer=3.0)
    assert slow.makespan > free.makespan
    first = {str(action): start for action, start, _ in slow.spans[0]}
    assert (first["0F0"], first["0F1"], first["0F2"], first["0F3"], first["0F4"]) == (0, 1, 2, 5, 8)
    assert sum(slow.waited_for_host) > 0
    told = describe_away(schedule.orders, slow.peak_live, slow.waited_for_host)
    assert "rank 0: 3 live at once" in told
    assert told.count("0F1 0F2 0F3 0F4 0F5 0F6") == 1


def test_schedules_of_arrays_are_refused() -> None:
    with pytest.raises(ScheduleError, match="simulated with activations in host memory"):
        simulate(build("1f1b", 512, 1024), offload=1)
