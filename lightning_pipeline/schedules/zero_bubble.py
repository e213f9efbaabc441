"""The zero-bubble schedules: backwards split into I and W, so that W fills what would be idle time.

Drawings have a column for each slot of time; F, I and W take one each. The orders are those of Qi et al.,
arXiv 2401.10241 and 2405.15362.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lightning_pipeline.schedules.builders import interleaved_1f1b_low_memory
from lightning_pipeline.schedules.schedule import Action, Kind, Schedule, v_placement
from lightning_pipeline.schedules.validation import ScheduleError, require_counts


def zero_bubble(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """1F1B whose weight gradients wait until a rank would be idle (ZB-H1)::

        rank 0  0F0 0F1  .  0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
        rank 1   .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3

    Rank r is r weight gradients behind, so every rank holds as many micro-batches as rank 0 does in 1F1B.

    Raises:
        ScheduleError: for more than one virtual stage on a rank.
    """
    if num_virtual_stages > 1:
        raise ScheduleError(
            f"zero_bubble runs one virtual stage on each rank, got num_virtual_stages={num_virtual_stages}; "
            f"for several use interleaved_zero_bubble, for two in a V zbv"
        )
    return replace(interleaved_zero_bubble(num_ranks, num_microbatches, num_virtual_stages), name="zero_bubble")


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Low-memory interleaved 1F1B whose weight gradients wait until a rank would be idle (ZB1P)::

        rank 0  0F0 0F1 2F0 2F1  .  2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        rank 1   .  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    Rank r is r weight gradients behind, so every rank holds as many activations as rank 0 does.
    """
    whole = interleaved_1f1b_low_memory(num_ranks, num_microbatches, num_virtual_stages)
    orders = tuple(_split_backwards(order, behind=rank) for rank, order in enumerate(whole.orders))
    return replace(whole, name="interleaved_zero_bubble", orders=orders)


def zbv(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Schedule:
    """Two virtual stages on each rank, placed in a V: stage r on the way down, stage 2 * num_ranks - 1 - r back up::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 1W3 2W3

    Every rank holds at most ``2 * num_ranks`` activations. From ``2 * num_ranks - 1`` micro-batches on no rank waits
    between its first and last action where F, I and W take equal times. With fewer the order is the one for that many,
    without those that are not there.

    Raises:
        ScheduleError: unless there are two virtual stages on each rank.
    """
    require_counts(num_ranks, num_microbatches, num_virtual_stages)
    if num_virtual_stages != 2:
        raise ScheduleError(
            f"zbv runs two virtual stages on each rank, got num_virtual_stages={num_virtual_stages}; "
            f"use num_virtual_stages=2, or zero_bubble for one and interleaved_zero_bubble for any number"
        )
    full = max(num_microbatches, 2 * num_ranks - 1)
    require_counts(num_ranks, full, num_virtual_stages)
    orders = tuple(_zbv_order(num_ranks, full, rank) for rank in range(num_ranks))
    return Schedule("zbv", orders, full, v_placement(num_ranks)).take(num_microbatches)


def _zbv_order(num_ranks: int, num_microbatches: int, rank: int) -> tuple[Action, ...]:
    """One rank's order; needs ``2 * num_ranks - 1`` micro-batches."""
    behind = num_ranks - rank - 1
    # How often, and what: 0 is the stage on the way down, 1 the one on the way up. Micro-batches ascend in each.
    phases = [
        (2 * behind, "F0"),
        (rank + 1, "F0 F1"),
        (behind, "I1 W1 F1"),
        (num_microbatches - 2 * num_ranks + rank + 1, "I1 W1 F0 I0 W0 F1"),
        (behind, "I1 W1 I0 W0 F1"),
        (1, "I1 W1 I0"),
        (rank, "I1 I0"),
        (behind, "W0 I0"),
        (rank + 1, "W0"),
        (rank, "W1"),
    ]
    stages = {"0": rank, "1": 2 * num_ranks - 1 - rank}
    done: Counter[str] = Counter()
    order = []
    for times, pattern in phases:
        for step in pattern.split() * times:
            order.append(Action(Kind(step[0]), stages[step[1]], done[step]))
            done[step] += 1
    return tuple(order)


def _split_backwards(order: Sequence[Action], *, behind: int) -> tuple[Action, ...]:
    """Each B becomes I, and its W follows the I that comes ``behind`` later; what is left comes last."""
    split: list[Action] = []
    weights: list[Action] = []
    next_weight = 0
    for action in order:
        if action.kind is not Kind.B:
            split.append(action)
            continue
        split.append(replace(action, kind=Kind.I))
        weights.append(replace(action, kind=Kind.W))
        if len(weights) > behind:
            split.append(weights[next_weight])
            next_weight += 1
    return (*split, *weights[next_weight:])
