"""Orders that are searched for: sound, within their bounds, and never slower than a schedule with a name."""

from __future__ import annotations

import random

import pytest

from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    build,
    check,
    default_virtual_stages,
    fuse,
    load_csv,
    optimize,
    save_csv,
)
from lightning_pipeline.schedules.optimizing import held_of_one, one_at_a_time
from lightning_pipeline.schedules.order_search import RULES, OrderSearch
from lightning_pipeline.schedules.recorded_costs import equal_costs
from lightning_pipeline.schedules.schedule import loop_placement, v_placement
from lightning_pipeline.schedules.simulation import peak_bytes


def costs_of(times: list[float], transfer: float = 0.0, whole: float = 2.0) -> Costs:
    """F, I and W of a stage take as long; a whole backward `whole` times as long as one of them."""
    return Costs(times, times, times, transfer, [whole * time for time in times])


def best_named(
    costs: Costs, placement: tuple[int, ...], num_microbatches: int, kept: list[float], most: float
) -> dict[str, float]:
    """The times of all schedules on these stages that keep the bound, whether halves are fused or not."""
    found = {}
    for name in SCHEDULE_NAMES:
        num_ranks = max(placement) + 1
        try:
            schedule = build(name, num_ranks, num_microbatches, len(placement) // num_ranks)
        except ScheduleError:
            continue
        if schedule.has_backward and schedule.placement == placement and max(peak_bytes(schedule, kept)) <= most:
            found[name] = min(costs.simulate(s).makespan for s in (schedule, fuse(schedule)))
    return found


@pytest.mark.parametrize(
    ("head", "kept_by_head", "num_microbatches", "gain"),
    [
        (2.0, 2.0, 8, 0.10),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((1.5, 2.0, 8, 0.10), (2.0, 3.0, 8, 0.05))),
        pytest.param(2.0, 2.0, 16, 0.05, marks=pytest.mark.slow),
    ],
)
def test_a_large_head(head: float, kept_by_head: float, num_microbatches: int, gain: float) -> None:
    """Its logits leave room for few micro-batches, which of the named schedules only 1F1B bears with."""
    costs, kept = costs_of([1.0, 1.0, 1.0, head]), [1.0, 1.0, 1.0, kept_by_head]
    found = optimize(costs, (0, 1, 2, 3), num_microbatches, kept_bytes=kept, max_bytes=4)
    check(found.schedule)
    assert max(peak_bytes(found.schedule, kept)) <= 4
    named = best_named(costs, (0, 1, 2, 3), num_microbatches, kept, 4)
    assert set(named) == {"1f1b", "interleaved_1f1b_low_memory"}
    assert {named[name] for name in named} == {found.named[name] for name in found.named}
    assert costs.simulate(found.schedule).makespan == found.makespan <= (1 - gain) * min(named.values())


@pytest.mark.parametrize("seed", range(4))
def test_never_slower_than_a_name_under_the_same_bound(seed: int) -> None:
    chance = random.Random(seed)
    num_ranks, virtual = chance.choice([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
    num_stages, num_microbatches = num_ranks * virtual, num_ranks + chance.randrange(5)
    placement = v_placement(num_ranks) if virtual == 2 and seed % 2 else loop_placement(num_ranks, virtual)
    times = [[chance.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(num_stages)] for _ in range(3)]
    costs = Costs(*times, chance.choice([0.0, 0.3]), [0.9 * (i + w) for i, w in zip(*times[1:], strict=True)])
    kept = [chance.choice([1.0, 2.0]) for _ in range(num_stages)]
    most = max(kept) * virtual * chance.choice([num_ranks, 2 * num_ranks])
    found = optimize(costs, placement, num_microbatches, kept_bytes=kept, max_bytes=most)
    check(found.schedule)
    assert max(peak_bytes(found.schedule, kept)) <= most
    named = best_named(costs, placement, num_microbatches, kept, most)
    assert costs.simulate(found.schedule).makespan == found.makespan <= min(named.values(), default=found.makespan)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_bounds_that_no_name_keeps(most: int) -> None:
    found = optimize(equal_costs(4), (0, 1, 2, 3), 8, max_live_microbatches=most)
    assert not found.named
    check(found.schedule)
    assert max(equal_costs(4).simulate(found.schedule).peak_live) == most
    # One micro-batch at a time takes four F, four I and a W; with three it is faster than 1F1B, which holds four (33).
    assert found.makespan <= {1: 8 * 9, 2: 41, 3: 31}[most]


@pytest.mark.parametrize("splits", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("placement", "kept"),
    [
        pytest.param((0, 1, 2, 3), [1.0, 1.0, 2.0, 5.0], marks=pytest.mark.slow),
        pytest.param((0, 1, 0, 1), [1.0, 3.0, 2.0, 4.0], marks=pytest.mark.slow),
        ((0, 1, 1, 0), [6.0, 1.0, 1.0, 3.0]),
    ],
)
def test_uneven_stages_under_any_bound_in_bytes(placement: tuple[int, ...], kept: list[float], splits: bool) -> None:
    """From the least that any order holds, where the fullest rank has one micro-batch at a time."""
    costs = costs_of([1.0, 0.5, 1.0, 2.0], 0.1, whole=2.0 if splits else 1.5)
    least = max(held_of_one(placement, kept))
    spans = []
    for most in (least, 1.5 * least, 3 * least):
        found = optimize(costs, placement, 6, kept_bytes=kept, max_bytes=most)
        check(found.schedule)
        assert max(peak_bytes(found.schedule, kept)) <= most
        spans.append(found.makespan)
    alone = one_at_a_time(placement, 6)
    check(alone)
    assert peak_bytes(alone, kept) == held_of_one(placement, kept)
    assert costs.simulate(alone).makespan > spans[0] >= spans[-1]


def test_the_same_arguments_find_the_same_order() -> None:
    first, second = (optimize(costs_of([1.0, 3.0], 0.2), (0, 1), 6, max_live_microbatches=2) for _ in range(2))
    assert first == second


def test_whole_backwards_where_halves_take_longer() -> None:
    found = optimize(costs_of([1.0, 1.0], whole=1.2), (0, 1), 4)
    assert not any(action.kind is Kind.I for order in found.schedule for action in order)


def test_it_is_written_and_read_as_it_is(tmp_path: object) -> None:
    found = optimize(costs_of([1.0, 1.0, 2.0]), (0, 1, 2), 6, max_live_microbatches=2)
    save_csv(found.schedule, f"{tmp_path}/mine.csv")
    assert load_csv(f"{tmp_path}/mine.csv") == found.schedule


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "interleaved_zero_bubble", "zbv", "v_min"])
def test_numbers_are_timed_as_schedules_are(name: str) -> None:
    virtual = default_virtual_stages(name)
    schedule: Schedule = build(name, 3, 5, virtual)
    stages = schedule.num_stages
    times = [[1 + (7 * stage + k) % 5 / 4 for stage in range(stages)] for k in range(3)]
    costs = Costs(*times, 0.25, [i + w for i, w in zip(*times[1:], strict=True)])
    splits = any(action.kind is Kind.I for order in schedule for action in order)
    search = OrderSearch(
        schedule.placement,
        5,
        forward=costs.forward,
        backward=costs.input_grad if splits else costs.backward,
        weight_grad=costs.weight_grad if splits else (),
        transfer=[0.25] * (stages - 1),
        bounds=[],
    )
    kinds = (Kind.F, Kind.I, Kind.W) if splits else (Kind.F, Kind.B)
    orders = [[kinds.index(action.kind) * stages + action.stage for action in order] for order in schedule]
    timed = search.timed(orders)
    assert timed is not None
    simulation = costs.simulate(schedule)
    assert timed.makespan == pytest.approx(simulation.makespan)
    for ends, spans in zip(timed.ends, simulation.spans, strict=True):
        assert ends == pytest.approx([span.end for span in spans])
    # The critical path is as long as the step: its blocks and the transfers between them.
    blocks = search.critical_blocks(orders, timed)
    busy = sum(search.durations[op] for rank, first, last in blocks for op in orders[rank][first : last + 1])
    assert timed.makespan - 0.25 * (len(blocks) - 1) <= busy + 1e-9 <= timed.makespan + 2e-9


def test_every_rule_gives_an_order() -> None:
    search = OrderSearch(
        (0, 1, 2),
        6,
        forward=[1, 1, 2],
        backward=[1, 1, 2],
        weight_grad=[1, 1, 2],
        transfer=[0.1, 0.1],
        bounds=[([1, 1, 2], 4)],
    )
    for rule in RULES:
        orders = search.listed(rule)
        assert orders is not None
        assert all(map(search.fits, orders))
        assert search.timed(orders) is not None


def test_what_cannot_be() -> None:
    with pytest.raises(ScheduleError, match=r"no order keeps max_live_microbatches=0\.5: 1 is the least"):
        optimize(equal_costs(2), (0, 1), 4, max_live_microbatches=0.5)
    with pytest.raises(ScheduleError, match="no order keeps max_bytes=6999999: 7000000 is the least, what rank 1"):
        optimize(equal_costs(4), (0, 1, 0, 1), 4, kept_bytes=[1e6, 3e6, 2e6, 4e6], max_bytes=6_999_999)
    with pytest.raises(ScheduleError, match="max_bytes=4 needs kept_bytes"):
        optimize(equal_costs(2), (0, 1), 4, max_bytes=4)
