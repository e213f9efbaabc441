"""The named schedules; those in a V are in ``v_builders``.

Drawings have a column for each slot of time, in which F, B, I and W take one slot each, and a dot where a rank is idle.
Those with I and W split backwards into the gradients of inputs, which the stage before waits for, and the gradients of
weights, which nothing waits for and which fill what would be idle time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import groupby, product
from types import ModuleType

from lightning_pipeline.schedules.schedule import Action, Kind, Schedule, loop_placement
from lightning_pipeline.schedules.v_builders import dualpipe_v, v_half, v_min, zbv
from lightning_pipeline.schedules.validation import (
    MAX_LARGE_PASSES,
    MAX_PASSES,
    ScheduleError,
    is_large,
    require_counts,
)


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
    require_counts(num_ranks, num_microbatches, num_virtual_stages, most_passes=MAX_LARGE_PASSES)
    num_forwards = num_virtual_stages * num_microbatches
    return _looped("gpipe", num_ranks, num_microbatches, num_virtual_stages, num_microbatches, lambda _: num_forwards)


def one_f_one_b(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """As many forwards as there are ranks behind, then one forward and one backward in turn, then what is left::

        rank 0  0F0 0F1  .  0B0 0F2 0B1 0F3 0B2  .  0B3
        rank 1   .  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    Rank r holds at most ``min(num_microbatches, num_ranks - r)`` micro-batches.
    """
    others = "interleaved_1f1b, interleaved_1f1b_low_memory or looped_bfs"
    _require_one_virtual_stage("1f1b", num_virtual_stages, others)
    return _interleaved("1f1b", num_ranks, num_microbatches, num_virtual_stages, hop=1)


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """1F1B that goes around the ranks once for each virtual stage, in groups of about ``num_ranks`` micro-batches::

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
    """Groups of `num_ranks` micro-batches, and `hop` forwards of warm-up for each rank behind."""
    require_counts(num_ranks, num_microbatches, num_virtual_stages, most_passes=MAX_LARGE_PASSES)
    # The first group includes those that do not fill a group of their own.
    first = min(num_ranks + num_microbatches % num_ranks, num_microbatches)
    before_last = (num_virtual_stages - 1) * first  # forwards of earlier virtual stages on the same rank
    return _looped(
        name, num_ranks, num_microbatches, num_virtual_stages, first, lambda behind: before_last + hop * behind
    )


def _looped(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_virtual_stages: int,
    first: int,
    warm_up_of: Callable[[int], int],
) -> Schedule:
    """Stages go around the ranks, and each group of micro-batches goes through all stages before the next one.

    Args:
        first: micro-batches of the first group; the others have `num_ranks`.
        warm_up_of: forwards of a rank before it alternates with backwards, by the number of ranks behind it.
    """
    placement = loop_placement(num_ranks, num_virtual_stages)
    if is_large(num_ranks, num_microbatches, num_virtual_stages):
        groups = [first, *[num_ranks] * ((num_microbatches - first) // num_ranks)]
        arrays = _compact().looped(num_ranks, groups, num_virtual_stages, warm_up_of)
        return Schedule(name, arrays, num_microbatches, placement)

    def group(microbatch: int) -> int:
        return 0 if microbatch < first else 1 + (microbatch - first) // num_ranks

    turns = list(product(range(num_virtual_stages), range(num_microbatches)))
    ascending = sorted(turns, key=lambda turn: (group(turn[1]), turn[0], turn[1]))
    descending = sorted(turns, key=lambda turn: (group(turn[1]), -turn[0], turn[1]))
    orders = []
    for rank in range(num_ranks):
        f = [Action(Kind.F, local * num_ranks + rank, i) for local, i in ascending]
        b = [Action(Kind.B, local * num_ranks + rank, i) for local, i in descending]
        warm_up = min(warm_up_of(num_ranks - rank - 1), len(f))
        steady = [action for pair in zip(f[warm_up:], b, strict=False) for action in pair]
        orders.append((*f[:warm_up], *steady, *b[len(f) - warm_up :]))
    return Schedule(name, tuple(orders), num_microbatches, placement)


def _compact() -> ModuleType:
    try:
        from lightning_pipeline.schedules import compact
    except ModuleNotFoundError as error:
        raise ScheduleError(f"a schedule of more than {MAX_PASSES:,} passes needs numpy ({error})") from error
    return compact


def zero_bubble(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """1F1B whose weight gradients wait until a rank would be idle (ZB-H1 of arXiv 2401.10241)::

        rank 0  0F0 0F1  .  0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
        rank 1   .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3

    Rank r is r weight gradients behind, so every rank holds as many micro-batches as rank 0 does in 1F1B.
    """
    _require_one_virtual_stage("zero_bubble", num_virtual_stages)
    return replace(interleaved_zero_bubble(num_ranks, num_microbatches, num_virtual_stages), name="zero_bubble")


def zero_bubble_h2(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Zero bubble with two forwards of warm-up for each rank behind instead of one (ZB-H2 of arXiv 2401.10241)::

        rank 0  0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1   .  1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

    It holds about twice the activations of 1F1B, at most ``2 * num_ranks - 1`` micro-batches on every rank, so that no
    rank waits between its first and last action where F, I and W take equal times: from that many micro-batches on a
    rank is idle for ``(num_ranks - 1) * (F + max(0, I - 2 * W))``.
    """
    _require_one_virtual_stage("zero_bubble_h2", num_virtual_stages)
    whole = _interleaved("zero_bubble_h2", num_ranks, num_microbatches, num_virtual_stages, hop=2)
    return _with_split_backwards(whole, lambda rank: 2 * rank)


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Low-memory interleaved 1F1B whose weight gradients wait until a rank would be idle (ZB1P of arXiv 2401.10241)::

        rank 0  0F0 0F1 2F0 2F1  .  2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        rank 1   .  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    Rank r is r weight gradients behind, so every rank holds as many activations as rank 0 does.
    """
    whole = interleaved_1f1b_low_memory(num_ranks, num_microbatches, num_virtual_stages)
    return replace(_with_split_backwards(whole, lambda rank: rank), name="interleaved_zero_bubble")


def _with_split_backwards(whole: Schedule, behind_of: Callable[[int], int]) -> Schedule:
    """Each rank's backwards split; `behind_of` tells by how many its weight gradients are behind."""
    if whole.is_large:
        return replace(whole, orders=_compact().split_backwards(whole.orders, behind_of))
    orders = (_split_backwards(order, behind=behind_of(rank)) for rank, order in enumerate(whole.orders))
    return replace(whole, orders=tuple(orders))


def _split_backwards(order: Sequence[Action], *, behind: int) -> tuple[Action, ...]:
    """Each B becomes I, and its W follows the I that comes ``behind`` later; what is left comes last."""
    split: list[Action] = []
    waiting: deque[Action] = deque()
    for action in order:
        if action.kind is not Kind.B:
            split.append(action)
            continue
        split.append(replace(action, kind=Kind.I))
        waiting.append(replace(action, kind=Kind.W))
        if len(waiting) > behind:
            split.append(waiting.popleft())
    return (*split, *waiting)


def _require_one_virtual_stage(
    name: str, num_virtual_stages: int, others: str = "interleaved_zero_bubble, for two in a V zbv"
) -> None:
    if num_virtual_stages > 1:
        raise ScheduleError(
            f"{name} runs one virtual stage on each rank, got num_virtual_stages={num_virtual_stages}; "
            f"for several use {others}"
        )


# Builder, and virtual stages on a rank unless the user chooses.
_SCHEDULES: dict[str, tuple[Callable[[int, int, int], Schedule], int]] = {
    "forward": (forward_only, 1),
    "gpipe": (gpipe, 1),
    "looped_bfs": (gpipe, 2),
    "1f1b": (one_f_one_b, 1),
    "interleaved_1f1b": (interleaved_1f1b, 2),
    "interleaved_1f1b_low_memory": (interleaved_1f1b_low_memory, 2),
    "zero_bubble": (zero_bubble, 1),
    "zero_bubble_h2": (zero_bubble_h2, 1),
    "interleaved_zero_bubble": (interleaved_zero_bubble, 2),
    "zbv": (zbv, 2),
    "v_half": (v_half, 2),
    "v_min": (v_min, 2),
    "dualpipe_v": (dualpipe_v, 2),
}

V_NAMES = ("zbv", "v_half", "v_min", "dualpipe_v")
"""Those that lay two virtual stages on each rank in a V."""
SCHEDULE_NAMES = tuple(_SCHEDULES)
"""The names that :func:`build` knows."""


def build(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Build the schedule called ``name``, with compute actions only.

    Args:
        name: one of :data:`SCHEDULE_NAMES`; "looped_bfs" is "gpipe" under the name it has with several virtual stages.
        num_ranks: ranks that work together on one copy of the model.
        num_microbatches: micro-batches in one step; for training at least ``num_ranks``.
        num_virtual_stages: virtual stages on each rank; 1 for "1f1b" and "zero_bubble", 2 for those in a V.

    Raises:
        ScheduleError: for an unknown name or counts that the schedule cannot have.
    """
    schedule = build_for_batch(name, num_ranks, num_microbatches, num_virtual_stages)
    if schedule.has_backward and num_microbatches < num_ranks:
        raise ScheduleError(
            f"num_microbatches must be at least the number of ranks for training, got num_microbatches="
            f"{num_microbatches} for {num_ranks} ranks; use {num_ranks} micro-batches or more, or fewer ranks"
        )
    return schedule


def build_for_batch(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """:func:`build` for any number of micro-batches, on the same placement.

    For a last batch that is too small for one micro-batch on each rank: it leaves ranks idle, but has to be trained.
    """
    builder, _ = _named(name)
    return replace(builder(num_ranks, num_microbatches, num_virtual_stages), name=name)


def placement_of(name: str, num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """For each virtual stage, the rank where the schedule called ``name`` has it, whatever the micro-batches.

    Raises:
        ScheduleError: for an unknown name or a number of virtual stages that the schedule cannot have.
    """
    return build_for_batch(name, num_ranks, 1, num_virtual_stages).placement


def default_virtual_stages(name: str) -> int:
    """Virtual stages on each rank where nothing says otherwise: two for those that interleave, else one."""
    return _named(name)[1]


def _named(name: str) -> tuple[Callable[[int, int, int], Schedule], int]:
    if name not in _SCHEDULES:
        close = get_close_matches(name, _SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ScheduleError(f"unknown schedule {name!r}; {hint}the schedules are {', '.join(_SCHEDULES)}")
    return _SCHEDULES[name]
