"""Costs measured from recorded times, whose simulation takes as long as the record."""

from __future__ import annotations

import random

import pytest

from lightning_pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    Timeline,
    build,
    extent,
    idle_share,
    measured_costs,
    recorded_schedule,
    simulate,
)
from lightning_pipeline.schedules.simulation import message_of

NAMES = ["gpipe", "1f1b", "zero_bubble", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv"]
TRANSFER, SEND = 0.3e-3, 0.1e-3

Row = list[tuple[Action, float, float]]


def schedule_named(name: str, num_ranks: int = 3, num_microbatches: int = 6) -> Schedule:
    return build(name, num_ranks, num_microbatches, 1 if name in ("gpipe", "1f1b", "zero_bubble") else 2)


def costs_of(schedule: Schedule, *, split: float = 1.0) -> tuple[list[float], list[float], list[float]]:
    """F, I and W, no two alike; `split` times as long where a backward is split."""
    stages = range(schedule.num_stages)
    splits = any(action.kind is Kind.I for order in schedule for action in order)
    factor = split if splits else 1.0
    return (
        [2e-3 + 1e-4 * stage for stage in stages],
        [(2e-3 - 1e-4 * stage) * factor for stage in stages],
        [(1e-3 + 2e-4 * stage) * factor for stage in stages],
    )


def sends(schedule: Schedule, kind: Kind, stage: int) -> float:
    return SEND if message_of(Action(kind, stage, 0), schedule) is not None else 0.0


def record(
    schedule: Schedule,
    *,
    split: float = 1.0,
    slower: float = 1.0,
    shifts: tuple[float, ...] = (),
    transfer: float | list[float] = TRANSFER,
) -> Timeline:
    """What a run would record in which a send takes its rank's time; rank's clocks are ahead by `shifts`."""
    forward, input_grad, weight_grad = costs_of(schedule, split=split)
    stages = range(schedule.num_stages)
    simulation = simulate(
        schedule,
        [slower * forward[stage] + sends(schedule, Kind.F, stage) for stage in stages],
        [slower * input_grad[stage] + sends(schedule, Kind.I, stage) for stage in stages],
        [slower * cost for cost in weight_grad],
        transfer,
    )
    timeline: list[Row] = []
    for rank, spans in enumerate(simulation.spans):
        shift = shifts[rank] if shifts else 0.0
        row: Row = []
        for action, start, end in spans:
            message = message_of(action, schedule)
            sent = end - (SEND if message else 0.0)
            row.append((action, start + shift, sent + shift))
            if message:
                row.append((message.send, sent + shift, end + shift))
        timeline.append(row)
    return timeline


def perturbed(schedule: Schedule, seed: int) -> Timeline:
    """A record whose actions take 5 % more or less, on clocks that are 50 microseconds apart."""
    random_numbers = random.Random(seed)
    timeline = record(schedule, shifts=tuple(random_numbers.uniform(-5e-5, 5e-5) for _ in range(schedule.num_ranks)))
    return [
        [(action, start, start + (end - start) * random_numbers.uniform(0.95, 1.0)) for action, start, end in row]
        for row in timeline
    ]


def length(timeline: Timeline) -> float:
    begin, end = extent(timeline)
    return end - begin


@pytest.mark.parametrize("name", NAMES)
def test_a_simulation_with_the_measured_costs_repeats_the_record(name: str) -> None:
    schedule = schedule_named(name)
    timeline = record(schedule)
    costs = measured_costs([timeline], schedule.placement)
    forward, input_grad, weight_grad = costs_of(schedule)
    stages = range(schedule.num_stages)
    assert costs.forward == pytest.approx([forward[s] + sends(schedule, Kind.F, s) for s in stages])
    assert costs.backward == pytest.approx(
        [input_grad[s] + weight_grad[s] + sends(schedule, Kind.I, s) for s in stages]
    )
    assert costs.transfer == pytest.approx(TRANSFER)
    assert costs.simulate(schedule).makespan == pytest.approx(length(timeline))
    again = simulate(schedule, costs.forward, costs.input_grad, costs.weight_grad, costs.transfer)
    assert again.makespan == pytest.approx(length(timeline))


@pytest.mark.parametrize("name", ["zero_bubble", "interleaved_zero_bubble", "zbv"])
def test_split_backwards_are_told_apart(name: str) -> None:
    schedule = schedule_named(name)
    costs = measured_costs([record(schedule)], schedule.placement)
    _, input_grad, weight_grad = costs_of(schedule)
    stages = range(schedule.num_stages)
    assert costs.input_grad == pytest.approx([input_grad[s] + sends(schedule, Kind.I, s) for s in stages])
    assert costs.weight_grad == pytest.approx(weight_grad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_uneven_times_and_clocks_matter_little(name: str, seed: int) -> None:
    schedule = schedule_named(name)
    timelines = [perturbed(schedule, 10 * seed + step) for step in range(4)]
    costs = measured_costs(timelines, schedule.placement)
    assert costs.simulate(schedule).makespan == pytest.approx(length(timelines[0]), rel=0.03)


def test_whole_backwards_are_halved_where_there_are_no_others() -> None:
    schedule = schedule_named("1f1b")
    costs = measured_costs([record(schedule)], schedule.placement)
    _, input_grad, weight_grad = costs_of(schedule)
    assert costs.weight_grad == pytest.approx([(i + w) / 2 for i, w in zip(input_grad, weight_grad, strict=True)])
    assert costs.backward == pytest.approx([i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)])


def test_steps_of_several_schedules() -> None:
    """Splitting makes backwards a half longer here, which a schedule that does not split has nothing of."""
    whole, split = schedule_named("1f1b"), schedule_named("zero_bubble")
    timelines = [record(whole, split=1.5), record(split, split=1.5)]
    costs = measured_costs(timelines, whole.placement)
    assert sum(costs.input_grad) + sum(costs.weight_grad) > 1.4 * sum(costs.backward)
    assert costs.simulate(whole).makespan == pytest.approx(length(timelines[0]))
    assert costs.simulate(split).makespan == pytest.approx(length(timelines[1]))
    gpipe = schedule_named("gpipe")
    assert costs.simulate(gpipe).makespan == pytest.approx(length(record(gpipe)))


def test_one_slow_step_does_not_count() -> None:
    schedule = schedule_named("1f1b")
    timelines = [record(schedule), record(schedule, slower=9.0), record(schedule)]
    costs = measured_costs(timelines, schedule.placement)
    assert costs.simulate(schedule).makespan == pytest.approx(length(timelines[0]))


def parse(*row: tuple[str, float, float]) -> Row:
    return [(Action.parse(text), start, end) for text, start, end in row]


def test_time_between_actions_counts_where_there_is_nothing_to_wait_for() -> None:
    """Rank 0 spends 0.5 before its second forward, and 0.25 before each send; rank 1 waits, which is no cost."""
    timeline = [
        parse(("0F0", 0.0, 1.0), ("0SEND_F0", 1.25, 1.25), ("0F1", 1.75, 2.75), ("0SEND_F1", 3.0, 3.0)),
        parse(("1RECV_F0", 0.0, 1.25), ("1F0", 1.25, 1.5), ("1RECV_F1", 1.5, 3.0), ("1F1", 3.125, 3.375)),
    ]
    costs = measured_costs([timeline], [0, 1])
    assert costs.forward == [1.75, 0.25]
    assert costs.transfer == 0.125
    assert costs.backward == costs.input_grad == costs.weight_grad == [0.0, 0.0]


def test_transfer_is_never_negative_and_zero_where_nothing_waited() -> None:
    early = [
        parse(("0F0", 0.0, 1.0), ("0SEND_F0", 1.0, 1.1), ("0F1", 1.1, 2.1), ("0SEND_F1", 2.1, 2.2)),
        parse(("1F0", 1.0, 1.5), ("1F1", 2.0, 2.5)),
    ]
    assert measured_costs([early], [0, 1]).transfer == 0.0
    assert measured_costs([[*early[:1], early[1][:1]]], [0, 1]).transfer == 0.0


def test_a_stage_that_never_ran() -> None:
    with pytest.raises(ScheduleError, match="no forward of stage 1; record at least one whole step"):
        measured_costs([[parse(("0F0", 0.0, 1.0)), []]], [0, 1])


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_schedule_is_the_one_that_ran(name: str) -> None:
    schedule = schedule_named(name)
    timeline = record(schedule)
    found = recorded_schedule(timeline, schedule.placement)
    assert found == schedule
    assert simulate(found).bubble > 0
    assert idle_share(timeline) > 0


def test_no_record_is_no_schedule() -> None:
    with pytest.raises(ScheduleError, match="a timeline of 2 ranks without any computation"):
        recorded_schedule([[], []], [0, 1])


def test_each_boundary_has_its_own_transfer() -> None:
    schedule, transfers = schedule_named("1f1b", num_ranks=3), [0.1e-3, 0.9e-3]
    recorded = record(schedule, transfer=transfers)
    costs = measured_costs([recorded], schedule.placement)
    assert costs.transfers == pytest.approx(transfers)
    begin, end = extent(recorded)
    assert costs.simulate(schedule).makespan == pytest.approx(end - begin, rel=1e-3)
