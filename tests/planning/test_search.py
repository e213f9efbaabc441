"""The search for cuts finds what trying all of them finds."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from lightning_pipeline.planning.cost_model import Cuts, Evaluator, Machine, Plan, Segment
from lightning_pipeline.planning.search import best_plans
from lightning_pipeline.schedules import ScheduleError, build, simulate
from lightning_pipeline.schedules.builders import build_for_batch
from lightning_pipeline.schedules.simulation import live_activations, peak_bytes

SCHEDULES = [
    ("gpipe", 3, 5, 1),
    ("1f1b", 2, 4, 1),
    ("1f1b", 4, 6, 1),
    ("zero_bubble", 3, 4, 1),
    ("interleaved_1f1b", 2, 4, 2),
    ("interleaved_zero_bubble", 2, 3, 2),
    ("zbv", 2, 4, 2),
]


def random_segments(generator: random.Random, count: int) -> list[Segment]:
    def amount(largest: float) -> float:
        return round(generator.uniform(0, largest) ** 2, 3)

    return [
        Segment(
            name=str(index),
            forward=amount(3),
            backward=amount(4),
            received=amount(30),
            returned=amount(30),
            kept=amount(10),
            messages=generator.randint(1, 3),
            state={str(index): amount(12), "tied": 7.0} if index in (0, count - 1) else {str(index): amount(12)},
        )
        for index in range(count)
    ]


def evaluate(segments: list[Segment], schedule: Any, cuts: Cuts, machine: Machine | None = None) -> Plan:
    return Evaluator(segments, schedule, machine or Machine()).plan(cuts)


def try_all(segments: list[Segment], schedule: Any, machine: Machine) -> list[Plan]:
    num_cuts = len(schedule.placement) - 1
    cuts: list[Cuts] = list(itertools.combinations(range(1, len(segments)), num_cuts))
    return [evaluate(segments, schedule, cut, machine) for cut in cuts]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches", "num_virtual"), SCHEDULES)
def test_no_cut_is_faster(name: str, num_ranks: int, num_microbatches: int, num_virtual: int, seed: int) -> None:
    generator = random.Random(seed)
    segments = random_segments(generator, generator.randint(num_ranks * num_virtual, 9))
    schedule = build(name, num_ranks, num_microbatches, num_virtual)
    machine = Machine(
        speeds=[generator.choice((0.5, 1.0, 2.0)) for _ in range(num_ranks)] if seed % 2 else (),
        bytes_per_second=generator.choice((10.0, 1e9)),
        latency=generator.choice((0.0, 0.5)),
        message=generator.choice((0.0, 0.1)),
        byte=generator.choice((0.0, 0.01)),
        overhead=generator.choice((0.0, 0.3)),
        replicas=1 + seed % 3,
    )
    plans = try_all(segments, schedule, machine)
    found = best_plans(segments, schedule, machine)[0]
    assert found.is_best
    assert found.seconds == pytest.approx(min(plan.seconds for plan in plans), rel=1e-9)
    # Within a memory that the fastest cut does not keep to, too, and with one that is different on each rank.
    memory = [max(plan.memory[rank] for plan in plans) * generator.uniform(0.5, 0.9) for rank in range(num_ranks)]
    tight = Machine(**{**vars(machine), "memory": memory})
    bounded = best_plans(segments, schedule, tight)[0]
    fitting = [plan.seconds for plan in try_all(segments, schedule, tight) if not plan.excess]
    assert (bounded.excess == 0) == bool(fitting)
    if fitting:
        assert bounded.seconds == pytest.approx(min(fitting), rel=1e-9)


def test_the_next_best_plans_come_after_the_best() -> None:
    segments = random_segments(random.Random(3), 7)
    schedule = build("1f1b", 3, 6)
    every = sorted(try_all(segments, schedule, Machine()), key=lambda plan: plan.seconds)
    found = best_plans(segments, schedule, most=3)
    assert found[0].cuts == every[0].cuts
    assert [plan.cuts for plan in found[1:]] == [plan.cuts for plan in every[1:3]]
    assert len(best_plans(segments[:4], schedule, most=9)) == 3  # there are no more


def test_a_plan_says_what_the_schedule_does_with_it() -> None:
    segments = [Segment(str(i), forward=f, backward=2 * f, received=10.0, kept=4.0) for i, f in enumerate((1, 2, 3, 4))]
    schedule = build("1f1b", 2, 4)
    plan = evaluate(segments, schedule, (3,), Machine(bytes_per_second=20.0, latency=0.25))
    by_hand = simulate(schedule, [6.0, 4.0], [6.0, 4.0], [6.0, 4.0], 0.75)
    assert plan.seconds == by_hand.makespan
    assert plan.memory == [2 * (3 * 4.0 + 10.0), 1 * (4.0 + 10.0)]


def test_a_rank_spends_time_on_what_it_sends_and_receives() -> None:
    segments = [Segment(str(i), 1.0, 1.0, received=8.0, returned=2.0, messages=3) for i in range(3)]
    spans = evaluate(segments, build("gpipe", 3, 3), (1, 2), Machine(message=0.25, byte=0.5)).simulation.spans
    forward, backward = 3 * 0.25 + 8 * 0.5, 3 * 0.25 + 2 * 0.5  # at each end of a stage
    took = [[span.end - span.start for span in (order[0], order[-1])] for order in spans]
    assert took[0] == [1 + forward, 1 + backward]
    assert took[1] == [1 + 2 * forward, 1 + 2 * backward]


def test_a_shared_parameter_is_held_once_by_each_rank() -> None:
    segments = [Segment(str(i), 1.0, 1.0, state={"tied": 8.0, str(i): 1.0}) for i in range(4)]
    assert evaluate(segments, build("1f1b", 2, 2), (2,)).memory == [10.0, 10.0]


def test_replicas_add_what_the_last_sum_takes() -> None:
    segments = [Segment(str(i), 1.0, 1.0, state={str(i): 40.0}) for i in range(2)]
    alone, two = (
        evaluate(segments, build("1f1b", 2, 2), (1,), Machine(bytes_per_second=5.0, replicas=n)) for n in (1, 2)
    )
    assert two.seconds - alone.seconds == pytest.approx(2 * (1 / 2) * 10 / 5)


def test_a_transfer_may_differ_from_boundary_to_boundary() -> None:
    schedule = build_for_batch("gpipe", 3, 1)
    assert simulate(schedule, 1.0, 1.0, 0.0, [0.25, 4.0]).makespan == 6 + 2 * 4.25
    with pytest.raises(ScheduleError, match="transfer has"):
        simulate(schedule, 1.0, 1.0, 0.0, [0.25])


def test_memory_is_what_is_live() -> None:
    schedule = build("1f1b", 2, 4)
    assert live_activations(schedule) == [2, 1]
    assert peak_bytes(schedule, [3.0, 5.0]) == [6.0, 5.0]
    both = build("interleaved_1f1b", 2, 4, 2)
    assert max(peak_bytes(both, [1.0] * 4)) == max(simulate(both).peak_live)


def test_memory_counts_what_is_taken_while_it_works() -> None:
    schedule = build("1f1b", 2, 4)  # rank 0 holds one more while it works on a forward or a backward
    assert peak_bytes(schedule, [3.0, 5.0], [4.0, 5.0], [3.0, 9.0]) == [3.0 + 4.0, 9.0]
    assert peak_bytes(schedule, [3.0, 5.0], [3.0, 5.0], [8.0, 5.0]) == [3.0 + 8.0, 5.0]
    # A peak counts from the beginning of its segment, and what the segments before it keep comes on top.
    segments = [
        Segment(str(i), 1.0, 1.0, received=2.0 * (i > 0), kept=4.0, backward_peak=peak)
        for i, peak in enumerate((5, 7, 4))
    ]
    assert evaluate(segments, build("gpipe", 2, 2), (2,)).memory == [2 * 8.0 + 4.0 - 1.0, 2 * 6.0]


def test_memory_counts_what_is_on_its_way() -> None:
    segments = [Segment(str(i), 1.0, 1.0, received=6.0, returned=10.0, messages=2) for i in range(3)]
    idle, busy = (
        evaluate(segments, build("gpipe", 3, 3), (1, 2), Machine(receives_ahead=ahead, sends_underway=sends)).memory
        for ahead, sends in ((0, 0), (2, 4))
    )
    comes, goes = 2 * 6.0 + 4 * 10.0 / 2, 2 * 10.0 + 4 * 6.0 / 2
    assert [b - i for b, i in zip(busy, idle, strict=True)] == [goes, comes + goes, comes]


def test_too_few_segments() -> None:
    with pytest.raises(ScheduleError, match="2 segments cannot be cut into 3 stages"):
        best_plans(random_segments(random.Random(0), 2), build("1f1b", 3, 3))


def test_forty_layers_on_four_ranks_are_sure_within_half_a_percent() -> None:
    layers = [Segment(str(i), 1.0, 2.0, received=1.0) for i in range(40)]
    segments = [Segment("", 0.1, 0.2), *layers, Segment("head", 3.0, 6.0)]
    plan = best_plans(segments, build("1f1b", 4, 16), gap=0.005)[0]
    assert plan.is_best
    again = best_plans(segments, build("1f1b", 4, 16), effort=800, gap=0.005)[0]
    assert not again.is_best  # and yet it is as good
    assert again.seconds <= plan.seconds * 1.005
    assert max(stage.forward for stage in plan.stages) <= 11.1
