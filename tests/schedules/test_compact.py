"""Schedules as arrays are the schedules of actions: the same orders, times and verdicts, at sizes those cannot have."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_pipeline.schedules import (
    Schedule,
    ScheduleError,
    as_schedule,
    build,
    build_for_batch,
    builders,
    check,
    lower,
    render,
    simulate,
)
from lightning_pipeline.schedules.compact import CompactOrders, arrays_of
from lightning_pipeline.schedules.summary import phases, save_overview, spread, summarize, thumbnail
from tests.memory_limit import little_memory

NAMES = {
    "gpipe": (1, 3),
    "1f1b": (1,),
    "interleaved_1f1b": (1, 2, 3),
    "interleaved_1f1b_low_memory": (2,),
    "zero_bubble": (1,),
    "zero_bubble_h2": (1,),
    "interleaved_zero_bubble": (2, 3),
}
COUNTS = [(1, 1), (1, 3), (2, 5), (3, 3), (4, 8), (4, 11), (5, 2)]


def as_arrays(monkeypatch: pytest.MonkeyPatch, name: str, *counts: int) -> tuple[Schedule, CompactOrders]:
    with monkeypatch.context() as patched:
        patched.setattr(builders, "is_large", lambda *_: True)
        schedule = build_for_batch(name, *counts)
    assert isinstance(schedule.orders, CompactOrders)
    return schedule, schedule.orders


@pytest.mark.parametrize(("name", "v"), [(name, v) for name, several in NAMES.items() for v in several])
def test_the_same_orders_and_times(name: str, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    for counts in COUNTS:
        usual, (large, _) = build_for_batch(name, *counts, v), as_arrays(monkeypatch, name, *counts, v)
        assert large.is_large and not usual.is_large
        assert [list(order) for order in large] == [list(order) for order in usual]
        assert large.orders[-1][0] == usual.orders[-1][0]
        assert large.orders[0][-2:] == list(usual.orders[0][-2:])
        check(large)
        assert (back := arrays_of(usual)) is not None and back == large
        f, i, w, transfer = ([chance.random() for _ in range(usual.num_stages)] for _ in range(4))
        expected, found = (simulate(schedule, f, i, w, transfer[:-1]) for schedule in (usual, large))
        assert found.makespan == expected.makespan
        assert found.bubble == pytest.approx(expected.bubble)
        assert found.peak_live == expected.peak_live
        assert list(found.spans) == expected.spans


def test_the_same_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two actions of a rank change places, or one becomes another: both refuse it, or both let it pass."""
    chance = random.Random(1)
    verdicts = set()
    for _ in range(300):
        name, v = chance.choice([("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2)])
        schedule, orders = as_arrays(monkeypatch, name, 3, 4, v)
        rows = orders.rows.copy()
        row = rows[chance.randrange(3)]
        one, other = chance.randrange(len(row)), chance.randrange(len(row))
        if chance.random() < 0.8:
            row[[one, other]] = row[[other, one]]
        else:
            row[one] = row[other]
        changed = CompactOrders(rows, orders.kinds, v)
        back = arrays_of(replace(schedule, orders=tuple(map(tuple, changed))))
        assert back is None or back.orders == changed
        refused = [is_refused(replace(schedule, orders=given)) for given in (changed, tuple(map(tuple, changed)))]
        assert refused[0] == refused[1], rows
        verdicts.add(refused[0])
    assert verdicts == {False, True}


@pytest.mark.parametrize(
    "schedule",
    [
        build("zbv", 2, 4, 2),  # in a V
        build("dualpipe_v", 2, 4, 2),
        as_schedule([["0F0", "0F1", "0B1", "0B0"]], name="descending", num_microbatches=2),
        as_schedule([["0F0", "0F1", "0B0", "0I1", "0W1"]], name="mixed", num_microbatches=2),
        as_schedule([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1"]], name="short", num_microbatches=2),
    ],
    ids=lambda schedule: schedule.name,
)
def test_what_arrays_cannot_be(schedule: Schedule) -> None:
    assert arrays_of(schedule) is None


def test_a_long_schedule_is_proved_as_arrays_and_its_faults_are_shown_all_the_same() -> None:
    schedule = build("1f1b", 4, 2048)
    begin = time.process_time()
    check(schedule)
    assert time.process_time() - begin < 1.0  # five seconds as actions
    orders = [list(order) for order in schedule]
    orders[3][8:10] = reversed(orders[3][8:10])
    with pytest.raises(ScheduleError, match=">3B4<"):
        check(replace(schedule, orders=tuple(map(tuple, orders))))
    with pytest.raises(ScheduleError, match=r"deadlock, rank 0 waits in (.|\n)*>3B4<"):
        simulate(replace(schedule, orders=tuple(map(tuple, orders))))


def is_refused(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ([0, 0, 0, 1, 1, 0], "rank 0 has 4 F of stage 0, but a step has 3 micro-batches"),
        ([0, 1, 1, 0, 0, 1], "rank 0 runs 0B1 before 0F1, which it needs"),
        ([0, 1, 2, 0, 0, 1], "rank 0 has 2 B of stage 0"),
    ],
)
def test_faults_are_named(row: list[int], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, orders = as_arrays(monkeypatch, "1f1b", 2, 3)
    rows = np.array([row, orders.rows[1]], np.uint8)
    with pytest.raises(ScheduleError, match=sentence):
        check(replace(schedule, orders=CompactOrders(rows, orders.kinds, 1)))


def test_a_deadlock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 begins with its second stage, which needs the second one of rank 0, and that the first one of rank 1."""
    schedule, orders = as_arrays(monkeypatch, "interleaved_1f1b", 2, 2, 2)
    rows = np.array([[0, 0, 1, 1, 3, 3, 2, 2], [1, 0, 0, 1, 3, 3, 2, 2]], np.uint8)
    with pytest.raises(ScheduleError, match="deadlock, rank 0 waits in 2F0; rank 1 waits in 3F0"):
        check(replace(schedule, orders=CompactOrders(rows, orders.kinds, 2)))


@pytest.mark.slow
def test_a_thousand_ranks_and_eight_thousand_microbatches() -> None:
    """16.8 million actions: in less than ten seconds, and with no more than another gibibyte."""
    begin = time.process_time()
    with little_memory():
        schedule = build("1f1b", 1024, 8192)
        check(schedule)
        simulation = simulate(schedule)
    assert time.process_time() - begin < 10
    assert simulation.makespan == 3 * (8192 + 1023)
    assert simulation.bubble == pytest.approx(1023 / (8192 + 1023))
    assert simulation.peak_live == list(range(1024, 0, -1))
    text = summarize(schedule, simulation.spans, simulation.makespan).splitlines()
    assert len(text) < 40 and max(map(len, text)) < 90


def test_what_a_large_schedule_is_not_for() -> None:
    schedule = build("gpipe", 64, 4097)
    assert schedule == build("gpipe", 64, 4097) != build("gpipe", 64, 4098)
    with pytest.raises(ScheduleError, match=r"has 262,208 passes .*; beyond 262,144 it can be .* not lowered"):
        lower(schedule)
    with pytest.raises(ScheduleError, match="not drawn or written"):
        render(schedule)
    with pytest.raises(ScheduleError, match=re.escape("at most 4,096 ranks, and 262,144 passes")):
        build("zbv", 64, 4097, 2)


def test_phases() -> None:
    assert [phases(order) for order in build("1f1b", 3, 8)] == ["3 F, 5 (B F), 3 B", "2 F, 6 (B F), 2 B", "8 (F B)"]
    assert phases(build("zero_bubble", 2, 5)[0]) == "2 F, 3 (I W F), 2 (I W)"


def test_thumbnail() -> None:
    """A column is three slots; where a rank begins its backwards within one, it does several kinds in it."""
    simulation = simulate(build("gpipe", 4, 16))
    assert thumbnail(simulation.spans, simulation.makespan, rows=3, columns=19) == [
        (0, "FFFFF...BBBBBBBBBBB"),
        (2, ".FFFFF.BBBBBBBBBBB."),
        (3, ".FFFFF=BBBBBBBBBB.."),
    ]


def test_spread() -> None:
    assert spread([4, 3, 2, 1]) == "4 3 2 1"
    assert spread([2.0] * 20) == "20 x 2"
    assert spread(list(range(32, 0, -1))) == "32 to 1, mean 16.5"


def test_overview(tmp_path: Path) -> None:
    schedule = build("zero_bubble", 512, 600)
    simulation = simulate(schedule)
    save_overview(simulation.spans, tmp_path / "large.png", simulation.makespan, title=schedule.name)
    assert (tmp_path / "large.png").read_bytes().startswith(b"\x89PNG")
