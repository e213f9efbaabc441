"""A module that no cut can balance is named, with what splitting it over the ranks would gain."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipeline.planning.cost_model import Machine, Segment
from lightning_pipeline.planning.large_module import LargeModule, find_large_module
from lightning_pipeline.planning.search import best_plans
from lightning_pipeline.schedules import build, simulate

NUM_RANKS, NUM_MICROBATCHES = 4, 8


def found(times: list[float], num_ranks: int = NUM_RANKS, machine: Machine | None = None) -> tuple[Any, float]:
    """What is found of modules that take these times, and the time of the best cut."""
    machine = machine or Machine()
    segments = [
        Segment(name=f"module {number}", forward=time / 3, backward=time * 2 / 3) for number, time in enumerate(times)
    ]
    [plan] = best_plans(segments, build("1f1b", num_ranks, NUM_MICROBATCHES), machine)
    return find_large_module(segments, plan, machine), plan.seconds


def test_a_head_larger_than_an_even_share_is_named() -> None:
    large, seconds = found([3.0] * 8 + [16.0])  # of 40, where an even share is 10
    assert isinstance(large, LargeModule)
    assert large.name == "module 8"
    assert large.share == pytest.approx(0.4)
    assert large.even_share == 0.25
    even = simulate(build("1f1b", NUM_RANKS, NUM_MICROBATCHES), [10 / 3] * 4, [10 / 3] * 4, [10 / 3] * 4)
    assert large.split_seconds == pytest.approx(even.makespan)
    assert large.split_seconds < 0.8 * seconds
    assert "module 8 takes 40% of a micro-batch's time, where an even share is 25%" in str(large)


def test_no_module_is_named_where_all_are_below_an_even_share() -> None:
    large, seconds = found([3.0, 3.0, 3.0], num_ranks=2)
    assert seconds > 8 * 6  # uneven, but for having few modules
    assert large is None


def test_no_module_is_named_where_splitting_it_gains_little() -> None:
    assert found([9.8, 10.2], num_ranks=2)[0] is None


def test_a_fast_rank_may_take_more() -> None:
    large, _ = found([3.0, 6.0], num_ranks=2, machine=Machine(speeds=(1.0, 3.0)))
    assert large is None  # its even share is three quarters
