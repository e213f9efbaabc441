"""The simulator's times, by hand."""

import pytest

from lightning_pipeline.schedules import Action, Kind, Schedule, ScheduleError, build, gpipe, lower, simulate


def ends(schedule: Schedule, **costs: object) -> dict[str, float]:
    return {str(action): end for spans in simulate(schedule, **costs).spans for action, _, end in spans}  # type: ignore[arg-type]


def test_times_of_a_small_pipeline() -> None:
    #  rank 0  0F0 0F1  .   .  0B0 0B0 0F2 ...
    #  rank 1   .  1F0 1B0 1B0 1F1 ...
    result = simulate(build("1f1b", 2, 3))
    assert [tuple(span) for span in result.spans[1][:3]] == [
        (Action(Kind.F, 1, 0), 1.0, 2.0),
        (Action(Kind.B, 1, 0), 2.0, 4.0),
        (Action(Kind.F, 1, 1), 4.0, 5.0),
    ]
    assert [str(span.action) for span in result.spans[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert (result.makespan, result.bubble) == (12.0, 0.25)


def test_costs_by_stage() -> None:
    times = ends(build("1f1b", 2, 2), forward=[1, 3], input_grad=[0.5, 1.0], weight_grad=[0.5, 2.0])
    assert times == {"0F0": 1, "1F0": 4, "1B0": 7, "0F1": 2, "0B0": 8, "1F1": 10, "1B1": 13, "0B1": 14}


def test_transfers_take_time_between_ranks_only() -> None:
    two_ranks = ends(gpipe(2, 1), transfer=0.5)
    assert two_ranks == {"0F0": 1, "1F0": 2.5, "1B0": 4.5, "0B0": 7}
    one_rank = ends(gpipe(1, 1, 2), transfer=0.5)
    assert one_rank == {"0F0": 1, "1F0": 2, "1B0": 4, "0B0": 6}


def test_the_next_stage_waits_for_the_input_half_only() -> None:
    order = [tuple(map(Action.parse, row.split())) for row in ("0F0 0I0 0W0", "1F0 1I0 1W0")]
    split = Schedule("split", tuple(order), num_microbatches=1, placement=(0, 1))
    times = ends(split, forward=1, input_grad=2, weight_grad=4)
    assert times == {"0F0": 1, "1F0": 2, "1I0": 4, "1W0": 8, "0I0": 6, "0W0": 10}


def test_activations_live_until_the_weight_half() -> None:
    order = tuple(map(Action.parse, ("0F0", "0I0", "0F1", "0I1", "0W0", "0F2", "0I2", "0W1", "0W2")))
    assert simulate(Schedule("split", (order,), num_microbatches=3, placement=(0,))).peak_live == [2]


def test_lowered_takes_the_same_time() -> None:
    schedule = build("interleaved_1f1b", 3, 7, 2)
    assert simulate(lower(schedule), transfer=0.3) == simulate(schedule, transfer=0.3)


def test_free_actions_make_no_bubble() -> None:
    result = simulate(build("gpipe", 2, 2), forward=0, input_grad=0, weight_grad=0)
    assert (result.makespan, result.bubble) == (0.0, 0.0)


def test_wrong_costs() -> None:
    with pytest.raises(ScheduleError, match="forward has 3 costs for 4 virtual stages"):
        simulate(build("gpipe", 2, 4, 2), forward=[1, 1, 1])
    with pytest.raises(ScheduleError, match="weight_grad must not be negative, got -1"):
        simulate(build("gpipe", 2, 4), weight_grad=-1)
