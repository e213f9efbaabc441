"""Bubble and live activations of balanced stages follow the formulas, whatever the numbers."""

from itertools import product

import pytest

from lightning_pipeline.schedules import build, forward_only, interleaved_1f1b, interleaved_1f1b_low_memory, simulate

RANKS_AND_MICROBATCHES = [(p, m) for p, m in product((1, 2, 3, 4, 7, 8), (1, 2, 4, 8, 9, 16, 21)) if m >= p]


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICROBATCHES)
def test_gpipe(p: int, m: int) -> None:
    for v in (1, 2, 3):
        result = simulate(build("gpipe", p, m, v), forward=1.0, input_grad=0.75, weight_grad=1.25)
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
    for v in (1, 2, 4):
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


@pytest.mark.parametrize(
    ("p", "m", "v", "percent"),
    [
        *[(4, 8, 1, 27.3), (4, 8, 2, 15.8), (4, 8, 4, 8.6)],
        *[(4, 16, 1, 15.8), (4, 16, 2, 8.6), (4, 16, 4, 4.5)],
        *[(8, 16, 1, 30.4), (8, 16, 2, 17.9), (8, 16, 4, 9.9)],
    ],
)
def test_reference_bubbles(p: int, m: int, v: int, percent: float) -> None:
    assert round(100 * simulate(build("interleaved_1f1b" if v > 1 else "1f1b", p, m, v)).bubble, 1) == percent


@pytest.mark.parametrize(("p", "m"), [*RANKS_AND_MICROBATCHES, (8, 1), (4, 3)])
def test_forward(p: int, m: int) -> None:
    result = simulate(forward_only(p, m))
    assert result.makespan == m + p - 1
    assert result.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert result.peak_live == [1] * p
