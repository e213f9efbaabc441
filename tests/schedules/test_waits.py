"""Why ranks wait, by cause: the times add up to what is no computation."""

from __future__ import annotations

import pytest

from lightning_pipeline.schedules import Action, build, idle_share, simulate
from lightning_pipeline.schedules.waits import Cause, Wait, live_over_time, shares, waits


def row(*spans: tuple[str, float, float]) -> list[tuple[Action, float, float]]:
    return [(Action.parse(name), start, end) for name, start, end in spans]


# Rank 1 prepares its Python (RECV) while rank 0 computes; the value arrives 0.5 after it was sent, at 2.5.
RECORDED = [
    row(("0F0", 0, 1), ("0SEND_F0", 1, 2), ("0RECV_B0", 2, 2), ("0B0", 7, 9)),
    row(("1RECV_F0", 0, 0.5), ("1F0", 3, 4), ("1B0", 4, 6), ("1SEND_B0", 6, 6.2)),
]


def found_in(causes: list[Wait]) -> list[tuple[str, float, float, str]]:
    return [(wait.cause.value, wait.start, wait.end, str(wait.on or "")) for wait in causes]


def test_each_cause() -> None:
    first, second = waits(RECORDED, [[], [(6.2, 8.0)]], transfer=0.5)
    assert found_in(first) == [("peer's compute", 1, 6, "1B0"), ("transfer", 6, 6.7, "1B0"), ("own Python", 6.7, 7, "")]
    assert found_in(second) == [
        ("peer's compute", 0, 1, "0F0"),
        ("transfer", 1, 2.5, "0F0"),
        ("own Python", 2.5, 3, ""),
        ("transfer", 6, 6.2, ""),
        ("reduction", 6.2, 8, ""),
        ("peer's compute", 8, 9, "0B0"),
    ]
    assert [wait.before for wait in second] == [Action.parse("1F0")] * 3 + [None] * 3


def test_a_rank_with_all_it_needs_waits_for_its_own_python() -> None:
    [alone] = waits([row(("0F0", 0, 1), ("0F1", 1.5, 2))])
    assert found_in(alone) == [("own Python", 1, 1.5, "")]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
def test_waits_are_what_is_no_computation(name: str) -> None:
    simulation = simulate(build(name, 4, 8, 2 if name in ("interleaved_1f1b", "zbv") else 1), transfer=0.25)
    found = [shares(own, simulation.makespan) for own in waits(simulation.spans, transfer=0.25)]
    assert sum(sum(one.values()) for one in found) / 4 == pytest.approx(idle_share(simulation.spans))
    assert all(one[Cause.PYTHON] == pytest.approx(0) for one in found)


def test_live_activations_reach_the_peak_and_end_at_none() -> None:
    simulation = simulate(build("zbv", 4, 8, 2))
    lines = live_over_time(simulation.spans, dict.fromkeys(range(8), 100.0))
    assert [max(count for _, count, _ in line) for line in lines] == simulation.peak_live
    assert all(line[-1][1:] == (0, 0.0) for line in lines)
    assert all(size == 100 * count for line in lines for _, count, size in line)
