"""A module that no cut can balance is named, with what splitting it over the ranks would gain."""

from __future__ import annotations

import pytest

from lightning_pipeline.planning.cost_model import Machine, Segment
from lightning_pipeline.planning.large_module import LargeModule, find_large_module
from lightning_pipeline.planning.search import best_plans
from lightning_pipeline.schedules import build, simulate

NUM_RANKS, NUM_MICROBATCHES = 4, 8


def found(head: float, machine: Machine | None = None) -> tuple[LargeModule | None, float]:
    """What is found of eight blocks of time 3 and a head, and the time of the best cut."""
    machine = machine or Machine()
    blocks = [Segment(name=f"blocks.{number}", forward=1.0, backward=2.0) for number in range(8)]
    segments = [*blocks, Segment(name="head", forward=head / 3, backward=head * 2 / 3)]
    [plan] = best_plans(segments, build("1f1b", NUM_RANKS, NUM_MICROBATCHES), machine)
    return find_large_module(segments, plan, machine), plan.seconds


def test_a_head_larger_than_an_even_share_is_named() -> None:
    large, seconds = found(head=16.0)  # of 40, where an even share is 10
    assert large is not None
    assert large.name == "head"
    assert large.share == pytest.approx(0.4)
    assert large.even_share == 0.25
    even = simulate(build("1f1b", NUM_RANKS, NUM_MICROBATCHES), [10 / 3] * 4, [10 / 3] * 4, [10 / 3] * 4)
    assert large.split_seconds == pytest.approx(even.makespan)
    assert large.split_seconds < 0.8 * seconds
    assert "head takes 40% of a micro-batch's time, where an even share is 25%" in str(large)


def test_no_module_is_named_where_a_cut_balances() -> None:
    assert found(head=8.0)[0] is None  # of 32


def test_a_fast_rank_may_take_more() -> None:
    large, _ = found(head=16.0, machine=Machine(speeds=(1.0, 1.0, 1.0, 3.0)))
    assert large is None  # the last rank's even share is half
