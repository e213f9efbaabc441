"""The orders equal those of torch.distributed.pipelining wherever these are sound."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS
from torch.distributed.pipelining.schedules import _Action

from lightning_pipeline.schedules import Action, build, save_csv

RANKS_AND_MICROBATCHES = [(p, m) for p, m in product((1, 2, 3, 4, 8), (1, 2, 4, 6, 8, 16)) if m >= p]


def bare(schedule_class: type, **attributes: Any) -> Any:
    """An instance that can give its order and nothing else: its constructor wants stages with models."""
    schedule: Any = object.__new__(schedule_class)
    vars(schedule).update(attributes)
    return schedule


def compute_actions(order: list[Any]) -> list[str]:
    return [str(action) for action in order if action is not None and action.is_compute_op]


def texts(order: list[Action]) -> list[str]:
    return [str(action) for action in order]


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICROBATCHES)
def test_gpipe(p: int, m: int) -> None:
    theirs = bare(ScheduleGPipe, _num_stages=p, _n_microbatches=m)._get_pipeline_order()
    for rank, order in enumerate(build("gpipe", p, m)):
        assert texts(order) == compute_actions(theirs[rank])


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICROBATCHES)
def test_1f1b(p: int, m: int) -> None:
    """On the last rank their table lists forwards from micro-batch 1 on; only its backwards are compared there."""
    theirs = bare(Schedule1F1B, _num_stages=p, _n_microbatches=m)._get_pipeline_order()
    for rank, order in enumerate(build("1f1b", p, m)):
        expected = compute_actions(theirs[rank])
        if rank < p - 1:
            assert texts(order) == expected
        else:
            backwards = [text for text in expected if "B" in text]
            assert texts(order) == [text for i, back in enumerate(backwards) for text in (f"{rank}F{i}", back)]


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICROBATCHES)
@pytest.mark.parametrize("v", [1, 2, 3])
def test_gpipe_forwards_with_virtual_stages(p: int, m: int, v: int) -> None:
    """Their looped breadth-first runs micro-batches backward in descending order; ours must ascend."""
    theirs = bare(ScheduleLoopedBFS, pp_group_size=p, _stages=[None] * v, _n_microbatches=m)
    for rank, order in enumerate(build("gpipe", p, m, v)):
        expected = compute_actions(theirs._calculate_single_rank_operations(rank))
        assert texts(order)[: v * m] == expected[: v * m]
        assert [action.stage for action in order] == [int(text.split("F")[0].split("B")[0]) for text in expected]


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in RANKS_AND_MICROBATCHES if m % p == 0])
@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaved(p: int, m: int, v: int) -> None:
    """Where ranks do not divide micro-batches, theirs needs equal groups and ours takes any number."""
    theirs = bare(
        ScheduleInterleaved1F1B, pp_group_size=p, n_local_stages=v, _n_microbatches=m, microbatches_per_round=p
    )
    for rank, order in enumerate(build("interleaved_1f1b", p, m, v)):
        assert texts(order) == compute_actions(theirs._calculate_single_rank_operations(rank))


def test_torch_reads_our_files(tmp_path: Path) -> None:
    schedule = build("interleaved_1f1b", 2, 4, 2)
    save_csv(schedule, tmp_path / "mine.csv")
    for order, line in zip(schedule, (tmp_path / "mine.csv").read_text().splitlines(), strict=True):
        assert compute_actions([_Action.from_str(cell) for cell in line.split(",")]) == texts(order)
