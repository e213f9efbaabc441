"""Bubble and live activations of balanced stages follow the formulas, whatever the numbers."""

from itertools import product
from typing import Any

import pytest

from lightning_pipeline.schedules import (
    Simulation,
    build,
    build_for_batch,
    forward_only,
    interleaved_1f1b,
    interleaved_1f1b_low_memory,
    simulate,
)


def often(counts: list[tuple[int, int]]) -> list[Any]:
    """Numbers of ranks and of micro-batches; large ones, and those between others, are slow."""
    return [pytest.param(p, m, marks=[pytest.mark.slow] * (p in (7, 13, 16) or m > 9)) for p, m in counts]


RANKS_AND_MICROBATCHES = often(
    [
        *[(p, m) for p, m in product((1, 2, 3, 4, 7, 8), (1, 2, 4, 8, 9, 16, 21)) if m >= p],
        *[(13, 40), (16, 16), (16, 64)],
    ]
)


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICROBATCHES)
def test_gpipe(p: int, m: int) -> None:
    for v in (1, 2, 3, 4):
        result = simulate(build("looped_bfs", p, m, v), forward=1.0, input_grad=0.75, weight_grad=1.25)
        assert result.bubble == pytest.approx((p - 1) / (v * m + p - 1))
        assert result.makespan == pytest.approx(3 * (v * m + p - 1))
        assert result.peak_live == [v * m] * p


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICROBATCHES)
def test_one_f_one_b(p: int, m: int) -> None:
    result = simulate(build("1f1b", p, m), forward=1.0, input_grad=0.75, weight_grad=1.25)
    assert result.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert result.makespan == pytest.approx(3 * (m + p - 1))
    assert result.peak_live == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICROBATCHES)
def test_interleaved(p: int, m: int) -> None:
    for v in (1, 2, 3, 4):
        megatron = simulate(interleaved_1f1b(p, m, v))
        low_memory = simulate(interleaved_1f1b_low_memory(p, m, v))
        warm_up = [(v - 1) * (p + m % p) + (p - rank - 1) for rank in range(p)]
        assert low_memory.peak_live == [min(w + 1, v * m) for w in warm_up]
        assert megatron.peak_live == [min(w + p - rank, v * m) for rank, w in enumerate(warm_up)]
        assert low_memory.makespan == megatron.makespan
        assert megatron.bubble == pytest.approx((p - 1) / (v * m + p - 1))


def test_interleaved_peaks_of_the_golden_grids() -> None:
    assert simulate(build("interleaved_1f1b_low_memory", 4, 8, 2)).peak_live == [8, 7, 6, 5]
    assert simulate(build("interleaved_1f1b", 4, 8, 2)).peak_live == [11, 9, 7, 5]


def test_low_memory_pays_for_latency() -> None:
    low_memory, megatron = (
        simulate(build(name, 4, 8, 2), transfer=0.25).makespan
        for name in ("interleaved_1f1b_low_memory", "interleaved_1f1b")
    )
    assert low_memory > megatron


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICROBATCHES)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.25, 0.75), (2, 1.5, 1.5), (1, 1, 0)])
def test_zero_bubble(p: int, m: int, f: float, i: float, w: float) -> None:
    """A rank is idle for (p-1)(F+I-W): in SCHEDULES.md, where B is the whole backward I+W, that is F+B-2W."""
    result = simulate(build("zero_bubble", p, m), f, i, w)
    assert idle_times(result) == pytest.approx([(p - 1) * (f + i - w)] * p)
    assert result.peak_live == [min(p, m)] * p


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICROBATCHES)
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaved_zero_bubble(p: int, m: int, v: int) -> None:
    """As long an idle time as with one virtual stage on each rank, but of stages that are v times smaller."""
    result = simulate(build("interleaved_zero_bubble", p, m, v), forward=1, input_grad=1.25, weight_grad=0.75)
    assert idle_times(result) == pytest.approx([(p - 1) * 1.5] * p)
    assert result.peak_live == [min((v - 1) * (p + m % p) + p, v * m)] * p


@pytest.mark.parametrize(("p", "m"), [*RANKS_AND_MICROBATCHES, *often([(4, 5), (4, 6), (8, 12), (16, 31), (16, 32)])])
def test_zbv(p: int, m: int) -> None:
    """Idle for p-1 where there are enough micro-batches to fill the V, at most twice as long with fewer."""
    result = simulate(build("zbv", p, m, 2))
    assert idle_times(result) == [(p - 1) + max(0, p - 1 - 2 * (m - p))] * p
    if m >= 2 * p - 1:
        assert result.peak_live == [2 * p] * p
    else:
        assert max(result.peak_live) <= 2 * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (1, 2, 3, 5, 8) for m in (2 * p - 1, 2 * p, 5 * p)])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 3, 1), (1, 1.5, 0.75), (1, 1, 2), (3, 1, 1)])
def test_zero_bubble_h2(p: int, m: int, f: float, i: float, w: float) -> None:
    result = simulate(build("zero_bubble_h2", p, m), f, i, w)
    assert idle_times(result) == pytest.approx([(p - 1) * (f + max(0, i - 2 * w))] * p)
    assert result.peak_live == [2 * p - 1] * p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, *(pytest.param(p, marks=pytest.mark.slow) for p in (7, 8, 9, 16))])
def test_v_half(p: int) -> None:
    """Half of 1F1B's activations on the fullest rank, as 2405.15362 says, whatever the micro-batches."""
    for m in (p, p + 1, 2 * p, 5 * p):
        result = simulate(build("v_half", p, m, 2))
        assert max(result.peak_live) == min(2 * (p // 2 + 1), 2 * m)
        assert idle_times(result) == [3 * p - (4 if p % 2 else 3) if p > 1 else 0] * p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, *(pytest.param(p, marks=pytest.mark.slow) for p in (7, 8, 9, 16))])
def test_v_min(p: int) -> None:
    """A third of 1F1B's activations on the fullest rank, as 2405.15362 says, whatever the micro-batches."""
    for m in (p, p + 1, 2 * p, 5 * p):
        result = simulate(build("v_min", p, m, 2))
        assert max(result.peak_live) == min(2 * ((p + 4) // 3), 2 * m)
        assert idle_times(result) == [4 * p - (5 if p % 3 else 3) if p > 1 else 0] * p


@pytest.mark.parametrize(("p", "m"), often([(p, m) for p in (1, 2, 3, 5, 8) for m in (2 * p, 2 * p + 1, 5 * p)]))
def test_dualpipe_v(p: int, m: int) -> None:
    result = simulate(build("dualpipe_v", p, m, 2))
    assert idle_times(result) == [p - 1] * p
    assert result.peak_live == [2 * p + 1] * p
    for fewer in range(1, 2 * p):
        assert max(simulate(build_for_batch("dualpipe_v", p, fewer, 2)).peak_live) <= 2 * p + 1


def idle_times(result: Simulation) -> list[float]:
    return [result.makespan - sum(span.end - span.start for span in spans) for spans in result.spans]


INTERLEAVED = [
    *[(4, 8, 1, 27.3), (4, 8, 2, 15.8), (4, 8, 4, 8.6)],
    *[(4, 16, 1, 15.8), (4, 16, 2, 8.6), (4, 16, 4, 4.5)],
    *[(8, 16, 1, 30.4), (8, 16, 2, 17.9), (8, 16, 4, 9.9)],
]
ZERO_BUBBLE = [(4, 8, 2, 5.9), (4, 16, 2, 3.0), (8, 16, 2, 6.8)]


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "percent"),
    [
        *[("1f1b" if row[2] == 1 else "interleaved_1f1b", *row) for row in INTERLEAVED],
        *[(name, *row) for name in ("interleaved_zero_bubble", "zbv") for row in ZERO_BUBBLE],
    ],
)
def test_reference_bubbles(name: str, p: int, m: int, v: int, percent: float) -> None:
    assert round(100 * simulate(build(name, p, m, v)).bubble, 1) == percent


@pytest.mark.parametrize(("p", "m"), [*RANKS_AND_MICROBATCHES, (8, 1), (4, 3)])
def test_forward(p: int, m: int) -> None:
    result = simulate(forward_only(p, m))
    assert result.makespan == m + p - 1
    assert result.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert result.peak_live == [1] * p
