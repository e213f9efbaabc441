"""Builders of the schedules with whole backwards, and of the forward-only one.

Drawings have a column for each slot of time; forward and backward take one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product

from lightning_pipeline.schedules.schedule import Action, Kind, Schedule, loop_placement
from lightning_pipeline.schedules.validation import ScheduleError, require_counts


def forward_only(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1, *, placement: Sequence[int] | None = None
) -> Schedule:
    """Forwards without backwards, for validation and prediction::

        rank 0  0F0 0F1 0F2 0F3
        rank 1   .  1F0 1F1 1F2 1F3

    There may be fewer micro-batches than ranks. With several virtual stages a rank finishes one for all micro-batches
    before the next; stages that follow one another on a rank run as if they were one, so that the next rank does not
    wait. In a V, with ``placement=(0, 1, 1, 0)``::

        rank 0  0F0 0F1  .  3F0  .  3F1
        rank 1   .  1F0 2F0 1F1 2F1

    Args:
        num_ranks: ranks that work together on one copy of the model.
        num_microbatches: micro-batches in one step.
        num_virtual_stages: virtual stages on each rank, in a loop; not used with ``placement``.
        placement: for each virtual stage its rank, in place of a loop.

    Raises:
        ScheduleError: for a count below one or beyond any schedule's, or a placement on a rank that does not exist.
    """
    require_counts(num_ranks, num_microbatches, num_virtual_stages)
    placement = loop_placement(num_ranks, num_virtual_stages) if placement is None else tuple(placement)
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    for rank, run in groupby(range(len(placement)), key=placement.__getitem__):
        if not 0 <= rank < num_ranks:
            raise ScheduleError(f"placement names rank {rank}, but there are {num_ranks} ranks, got {placement}")
        orders[rank] += [Action(Kind.F, stage, i) for i, stage in product(range(num_microbatches), list(run))]
    return Schedule("forward", tuple(map(tuple, orders)), num_microbatches, placement)


def gpipe(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """All forwards, then all backwards::

        rank 0  0F0 0F1 0F2 0F3  .   .  0B0 0B1 0B2 0B3
        rank 1   .  1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3

    With several virtual stages a rank finishes one for all micro-batches before the next, forward in ascending and
    backward in descending order of stages. Micro-batches ascend in both.
    """
    require_counts(num_ranks, num_microbatches, num_virtual_stages)
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_virtual_stages, num_ranks)
        forwards = [(stage, i) for stage in stages for i in range(num_microbatches)]
        backwards = [(stage, i) for stage in reversed(stages) for i in range(num_microbatches)]
        orders.append(_alternate(forwards, backwards, warm_up=len(forwards)))
    return _schedule("gpipe", orders, num_microbatches, num_virtual_stages)


def one_f_one_b(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """As many forwards as there are ranks behind, then one forward and one backward in turn, then what is left::

        rank 0  0F0 0F1  .  0B0 0F2 0B1 0F3 0B2  .  0B3
        rank 1   .  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    Rank r holds at most ``min(num_microbatches, num_ranks - r)`` micro-batches.

    Raises:
        ScheduleError: for more than one virtual stage on a rank.
    """
    require_counts(num_ranks, num_microbatches, num_virtual_stages)
    if num_virtual_stages != 1:
        raise ScheduleError(
            f"1f1b runs one virtual stage on each rank, got num_virtual_stages={num_virtual_stages}; "
            f"for several use interleaved_1f1b, interleaved_1f1b_low_memory or looped_bfs"
        )
    orders = []
    for rank in range(num_ranks):
        passes = [(rank, i) for i in range(num_microbatches)]
        orders.append(_alternate(passes, passes, warm_up=num_ranks - rank - 1))
    return _schedule("1f1b", orders, num_microbatches, num_virtual_stages)


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """1F1B that goes round the ranks once for each virtual stage, in groups of about ``num_ranks`` micro-batches::

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
        rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    The order is Megatron-LM's, for any number of micro-batches: those beyond a multiple of ``num_ranks`` join the
    first group.
    """
    return _interleaved("interleaved_1f1b", num_ranks, num_microbatches, num_virtual_stages, hop=2)


def interleaved_1f1b_low_memory(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Interleaved 1F1B with one forward of warm-up for each rank behind instead of two::

        rank 0  0F0 0F1 2F0 2F1  .  2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2  .  2B3 0B2 0B3
        rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    It holds fewer activations and takes no longer as long as transfers cost nothing. The order is MindSpore's.
    """
    return _interleaved("interleaved_1f1b_low_memory", num_ranks, num_microbatches, num_virtual_stages, hop=1)


def _interleaved(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int, *, hop: int) -> Schedule:
    require_counts(num_ranks, num_microbatches, num_virtual_stages)
    extra = num_microbatches % num_ranks
    # The first group takes in what does not fill a group of its own.
    first = min(num_ranks + extra, num_microbatches)

    def group(microbatch: int) -> int:
        return 0 if microbatch < first else (microbatch - extra) // num_ranks

    turns = list(product(range(num_virtual_stages), range(num_microbatches)))
    ascending = sorted(turns, key=lambda turn: (group(turn[1]), turn[0], turn[1]))
    descending = sorted(turns, key=lambda turn: (group(turn[1]), -turn[0], turn[1]))
    orders = []
    for rank in range(num_ranks):
        forwards = [(local * num_ranks + rank, i) for local, i in ascending]
        backwards = [(local * num_ranks + rank, i) for local, i in descending]
        warm_up = (num_virtual_stages - 1) * first + hop * (num_ranks - rank - 1)
        orders.append(_alternate(forwards, backwards, warm_up=warm_up))
    return _schedule(name, orders, num_microbatches, num_virtual_stages)


def _alternate(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], *, warm_up: int
) -> tuple[Action, ...]:
    """``warm_up`` forwards, then a forward and a backward in turn, then the other backwards; (stage, micro-batch)."""
    warm_up = min(warm_up, len(forwards))
    f = [Action(Kind.F, stage, microbatch) for stage, microbatch in forwards]
    b = [Action(Kind.B, stage, microbatch) for stage, microbatch in backwards]
    steady = [action for pair in zip(f[warm_up:], b, strict=False) for action in pair]
    return (*f[:warm_up], *steady, *b[len(f) - warm_up :])


def _schedule(name: str, orders: list[tuple[Action, ...]], num_microbatches: int, num_virtual_stages: int) -> Schedule:
    return Schedule(name, tuple(orders), num_microbatches, loop_placement(len(orders), num_virtual_stages))
