"""The orders equal those of torch.distributed.pipelining wherever these are sound.

Equal, action by action, for all p, m and v below:

- "gpipe" with one virtual stage and ScheduleGPipe;
- "1f1b" and Schedule1F1B, but for the last rank, where theirs lists forwards that do not exist and lacks the first;
- "interleaved_1f1b" and ScheduleInterleaved1F1B, "interleaved_zero_bubble" and ScheduleInterleavedZeroBubble where
  ranks divide micro-batches or there are fewer than two for each rank, also fewer micro-batches than ranks;
- "zero_bubble" and ScheduleInterleavedZeroBubble with one stage a rank, for every m that theirs takes;
- "zbv" and ScheduleZBVZeroBubble up to the last weight gradients: behind all else theirs does those of the stage on
  the way up first, ours those of the stage on the way down. Nothing waits for either;
- "dualpipe_v" and ScheduleDualPipeV, whose overlapping pairs are a forward and then a backward here.

Not equal, on purpose:

- "looped_bfs" and ScheduleLoopedBFS: theirs runs micro-batches backward in descending order, and gradients would add up
  in another order than in other schedules. Forwards, and the order of stages, are equal.
- Both interleaved ones where m is at least 2p and p does not divide it: theirs makes groups of equal size or refuses,
  ours adds the micro-batches left over to the first group, as MindSpore does.
- "interleaved_1f1b_low_memory" has no counterpart; split in I and W it is "interleaved_zero_bubble".
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action

from lightning_pipeline.schedules import Action, Kind, build, build_for_batch, save_csv

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
def test_looped_bfs_forwards(p: int, m: int, v: int) -> None:
    """Their looped breadth-first runs micro-batches backward in descending order; ours must ascend."""
    theirs = bare(ScheduleLoopedBFS, pp_group_size=p, _stages=[None] * v, _n_microbatches=m)
    for rank, order in enumerate(build("looped_bfs", p, m, v)):
        expected = compute_actions(theirs._calculate_single_rank_operations(rank))
        assert texts(order)[: v * m] == expected[: v * m]
        assert [action.stage for action in order] == [int(text.split("F")[0].split("B")[0]) for text in expected]


INTERLEAVED = [
    (p, m) for p, m in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16)) if m % p == 0 or m < 2 * p
]


@pytest.mark.parametrize(("p", "m"), INTERLEAVED)
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "schedule_class"),
    [
        ("interleaved_1f1b", ScheduleInterleaved1F1B),
        ("interleaved_zero_bubble", ScheduleInterleavedZeroBubble),
    ],
)
def test_interleaved(name: str, schedule_class: type, p: int, m: int, v: int) -> None:
    for rank, order in enumerate(build_for_batch(name, p, m, v)):
        assert texts(order) == interleaved_order(schedule_class, rank, p, m, v)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 3), (2, 4), (3, 10), (4, 2), (4, 4), (4, 10), (8, 18), (8, 32)])
def test_zero_bubble(p: int, m: int) -> None:
    for rank, order in enumerate(build_for_batch("zero_bubble", p, m)):
        assert texts(order) == interleaved_order(ScheduleInterleavedZeroBubble, rank, p, m, 1)


def interleaved_order(schedule_class: type, rank: int, p: int, m: int, v: int) -> list[str]:
    theirs = bare(
        schedule_class,
        pp_group_size=p,
        n_local_stages=v,
        _n_microbatches=m,
        microbatches_per_round=m // max(1, m // p),
    )
    return compute_actions(theirs._calculate_single_rank_operations(rank))


@pytest.mark.parametrize(("p", "m"), list(product((1, 2, 3, 4, 8), (1, 2, 3, 4, 6, 7, 8, 9, 16, 17))))
def test_zbv(p: int, m: int) -> None:
    theirs = bare(ScheduleZBVZeroBubble, pp_group_size=p, _num_stages=2 * p, num_stages=2 * p, _n_microbatches=m)
    for rank, order in enumerate(build_for_batch("zbv", p, m, 2)):
        expected = compute_actions(theirs._calculate_single_rank_operations(rank))
        tail = max(place for place, action in enumerate(order) if action.kind is not Kind.W) + 1
        assert texts(order)[:tail] == expected[:tail]
        assert texts(order)[tail:] == sorted(expected[tail:], key=lambda text: text.split("W")[0] != str(rank))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (2 * p, 2 * p + 1, 5 * p)])
def test_dualpipe_v(p: int, m: int) -> None:
    theirs = bare(ScheduleDualPipeV, pp_group_size=p, num_stages=2 * p, _num_stages=2 * p, _n_microbatches=m)
    for rank, order in enumerate(build("dualpipe_v", p, m, 2)):
        pairs = [action.sub_actions or [action] for action in theirs._calculate_single_rank_operations(rank)]
        assert texts(order) == [str(action) for pair in pairs for action in pair]


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv"])
def test_torch_reads_our_files(name: str, tmp_path: Path) -> None:
    schedule = build(name, 2, 4, 2)
    save_csv(schedule, tmp_path / "mine.csv")
    for order, line in zip(schedule, (tmp_path / "mine.csv").read_text().splitlines(), strict=True):
        assert compute_actions([_Action.from_str(cell) for cell in line.split(",")]) == texts(order)
