"""Every schedule is complete, in order and free of deadlock, whatever the numbers."""

from collections import defaultdict
from itertools import product

import pytest

from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    Kind,
    Schedule,
    build,
    build_for_batch,
    check,
    default_virtual_stages,
    lower,
)

FIXED = ("1f1b", "zero_bubble", "zero_bubble_h2", "zbv", "v_half", "v_min", "dualpipe_v")
# Ranks, micro-batches and virtual stages: as many as there are ranks, not a multiple of them, about two for each rank
# and many more.
LARGE = [
    (3, 40, 2),
    (6, 13, 3),
    pytest.param(7, 64, 4, marks=pytest.mark.slow),
    (8, 15, 2),
    pytest.param(8, 16, 4, marks=pytest.mark.slow),
    (11, 37, 1),
    (12, 12, 3),
    pytest.param(16, 31, 2, marks=pytest.mark.slow),
    pytest.param(16, 33, 1, marks=pytest.mark.slow),
    pytest.param(16, 64, 4, marks=pytest.mark.slow),
]


def prove(schedule: Schedule) -> None:
    check(lower(schedule))
    seen = defaultdict(list)
    for action in (action for order in schedule for action in order):
        # B is both halves, as a stage may run some backwards whole and others split.
        for kind in (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,):
            seen[kind, action.stage].append(action.microbatch)
    for kind, stage in seen:
        assert seen[kind, stage] == list(range(schedule.num_microbatches)), f"{kind} of stage {stage}"


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_small(name: str, num_ranks: int) -> None:
    """All of them, also with fewer micro-batches than ranks."""
    for num_microbatches, v in product(range(1, 2 * num_ranks + 3), range(1, 5)):
        if name not in FIXED or v == default_virtual_stages(name):
            prove(build_for_batch(name, num_ranks, num_microbatches, v))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches", "v"), LARGE)
def test_large(name: str, num_ranks: int, num_microbatches: int, v: int) -> None:
    v = default_virtual_stages(name) if name in FIXED else v
    prove(build(name, num_ranks, num_microbatches, v))
