"""The named schedules whose two virtual stages on each rank lie in a V: the first rank holds the first and the last.

A gradient is back on the rank of its forward soonest on the first rank for the stage on the way down, and on the last
rank for the one on the way up, so all ranks hold about as many activations. Drawings are as in ``builders``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from lightning_pipeline.schedules.schedule import Action, Kind, Schedule, v_placement
from lightning_pipeline.schedules.simulation import needs
from lightning_pipeline.schedules.validation import ScheduleError, require_counts


def zbv(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Schedule:
    """Two virtual stages on each rank, placed in a V: r on the way down, 2 * num_ranks - 1 - r back up::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 1W3 2W3

    Every rank holds at most ``2 * num_ranks`` activations. From ``2 * num_ranks - 1`` micro-batches on no rank waits
    between its first and last action where F, I and W take equal times. With fewer the order is the one for that many,
    without those that are missing. The order is from arXiv 2405.15362.
    """
    return _in_phases("zbv", num_ranks, num_microbatches, num_virtual_stages, _zbv_phases)


def _zbv_phases(num_ranks: int, num_microbatches: int, rank: int) -> Phases:
    behind = num_ranks - rank - 1
    return [
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


def dualpipe_v(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Schedule:
    """A V in which the forwards of one way alternate with the backwards of the other (DualPipeV)::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3  .  0B1 0B1 3B3 3B3 0I2 0W2 0I3 0W3
        rank 1   .  1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2I3 1I3 2W3 1W3

    In the steady state each forward is next to a whole backward of the other virtual stage, which kernels that overlap
    one's transfers with the other's computation want; here they run one after the other. Every rank holds at most
    ``2 * num_ranks + 1`` activations, and where F, I and W take equal times is idle for ``num_ranks - 1`` of them from
    ``2 * num_ranks`` micro-batches on. With fewer the order is the one for ``2 * num_ranks - 1``, without those that
    are missing. The order is DeepSeek's (DualPipe of arXiv 2412.19437, cut in half).
    """
    return _in_phases("dualpipe_v", num_ranks, num_microbatches, num_virtual_stages, _dualpipe_v_phases)


def _dualpipe_v_phases(num_ranks: int, num_microbatches: int, rank: int) -> Phases:
    behind = num_ranks - rank - 1
    # Of the last backwards in both stages, the first half is whole and the second one split.
    last = ["1", "0"] * (rank + 1)
    whole, split = (
        " ".join(kind + way for way in half) for kind, half in (("B", last[: rank + 1]), ("I", last[rank + 1 :]))
    )
    return [
        (2 * behind, "F0"),
        (rank + 1, "F0 F1"),
        (behind, "I1 W F1"),
        (num_microbatches - 2 * num_ranks + rank + 1, "F0 B1 F1 B0"),
        (behind, "B1 F1 B0"),
        (1, f"{whole} {split}"),
        (behind, "W I0"),
        (rank + 1, "W"),
    ]


Phases = Sequence[tuple[int, str]]
"""How often, and which actions: 0 is the stage on the way down, 1 the one back up, and micro-batches ascend in each. A
W without a stage is that of the I which waits for its W longest."""


def _in_phases(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_virtual_stages: int,
    phases_of: Callable[[int, int, int], Phases],
) -> Schedule:
    """A schedule by the phases of each rank, which ``phases_of(num_ranks, num_microbatches, rank)`` gives."""
    _require_v(name, num_ranks, num_microbatches, num_virtual_stages)
    full = max(num_microbatches, 2 * num_ranks - 1)
    require_counts(num_ranks, full, num_virtual_stages)
    orders = tuple(
        _one_by_one(phases_of(num_ranks, full, rank), (rank, 2 * num_ranks - 1 - rank)) for rank in range(num_ranks)
    )
    return Schedule(name, orders, full, v_placement(num_ranks)).take(num_microbatches)


def _one_by_one(phases: Phases, stages: tuple[int, int]) -> tuple[Action, ...]:
    done: Counter[tuple[str, int]] = Counter()
    waiting: deque[int] = deque()
    order = []
    for step in (step for times, pattern in phases for step in pattern.split() * times):
        stage = stages[int(step[1])] if step[1:] else waiting.popleft()
        # A whole backward is both halves.
        halves = "IW" if step[0] == "B" else step[0]
        order.append(Action(Kind(step[0]), stage, done[halves[0], stage]))
        done.update((half, stage) for half in halves)
        if step[0] == "I":
            waiting.append(stage)
    return tuple(order)


def v_half(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Schedule:
    """A V that holds half of what 1F1B does on its first rank (V-Half of arXiv 2405.15362)::

        rank 0  0F0 0F1  .   .   .  5F0 5I0 0F2 5W0 5F1 5I1 5W1 0I0 0W0  .  5F2 5I2 0I1 5W2 0W1  .  0I2 0W2
        rank 1   .  1F0  .   .  4F0 1F1  .  4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
        rank 2   .   .  2F0 3F0  .   .  2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2

    Every rank holds at most ``2 * (num_ranks // 2 + 1)`` activations, the size of ``num_ranks // 2 + 1`` micro-batches.
    Where F, I and W take equal times a rank is idle for ``3 * num_ranks - 3`` of them with an even number of ranks, and
    for ``3 * num_ranks - 4`` with an odd one above 1. The paper's own search may save another four.
    """
    _require_v("v_half", num_ranks, num_microbatches, num_virtual_stages)
    shift = 0 if num_ranks % 2 else 3
    blocks = [
        (2 * r, 3 * num_ranks - 2 - r, 3 * num_ranks - 1 + shift + 2 * r, 6 * num_ranks - 2 + shift - r)
        for r in range(num_ranks)
    ]
    return _repeated("v_half", num_microbatches, blocks, most_live=2 * (num_ranks // 2 + 1))


def v_min(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Schedule:
    """A V that holds a third of what 1F1B does on its first rank, the least there is (V-Min of arXiv 2405.15362)::

        rank 0  0F0  .   .   .   .  5F0 0F1 5I0 5W0  .   .  5F1  .  0I0 5I1 0W0 5W1  .   .  0I1 0W1
        rank 1   .  1F0  .   .  4F0  .   .  1F1 4I0 4W0 4F1  .  1I0 1W0  .  4I1 4W1  .  1I1 1W1
        rank 2   .   .  2F0 3F0  .   .   .   .  2F1 3F1 3I0 2I0 3W0 2W0  .   .  3I1 2I1 3W1 2W1

    Every rank holds at most ``2 * ((num_ranks + 4) // 3)`` activations, the size of ``(num_ranks + 4) // 3``
    micro-batches. Where F, I and W take equal times a rank is idle for ``4 * num_ranks - 3`` of them with a multiple of
    three ranks, and for ``4 * num_ranks - 5`` with other numbers above 1. The paper's own search may save another four.
    """
    _require_v("v_min", num_ranks, num_microbatches, num_virtual_stages)
    shift = 0 if num_ranks % 3 else 2
    blocks = [
        (r, 2 * num_ranks - 1 - r, 2 * num_ranks + shift + r, 4 * num_ranks - 1 + shift - r) for r in range(num_ranks)
    ]
    return _repeated("v_min", num_microbatches, blocks, most_live=2 * ((num_ranks + 4) // 3))


_INTERVAL = 6  # slots between one micro-batch and the next: two each of F, I and W


def _repeated(
    name: str,
    num_microbatches: int,
    blocks: Sequence[tuple[int, int, int, int]],
    *,
    most_live: int,
) -> Schedule:
    """The same block of slots on every micro-batch, six slots later each time, as early as what it needs allows.

    A W takes whatever slot would be idle.

    Args:
        blocks: for each rank, when the first micro-batch's F on the way down, F and I on the way up, and I on the way
            down are; no two at the same time modulo six.
        most_live: F waits where a rank holds as many activations.
    """
    num_ranks = len(blocks)
    todo: list[deque[Action]] = []
    for rank, slots in enumerate(blocks):
        down, up = rank, 2 * num_ranks - 1 - rank
        kinds = ((Kind.F, down), (Kind.F, up), (Kind.I, up), (Kind.I, down))
        turns = sorted(
            (slot + _INTERVAL * i, way, i) for way, slot in enumerate(slots) for i in range(num_microbatches)
        )
        todo.append(deque(Action(*kinds[way], i) for _, way, i in turns))
    orders: list[list[Action]] = [[] for _ in blocks]
    weights: list[deque[Action]] = [deque() for _ in blocks]
    live = [0] * num_ranks
    there: set[Action] = set()  # values of earlier slots
    while any(todo) or any(weights):
        made: list[Action] = []
        for rank, order in enumerate(orders):
            action = todo[rank][0] if todo[rank] else None
            has_room = action is None or action.kind is not Kind.F or live[rank] < most_live
            if action and has_room and there.issuperset(needs(action, 2 * num_ranks)):
                todo[rank].popleft()
                made.append(action)
                if action.kind is Kind.F:
                    live[rank] += 1
                else:
                    weights[rank].append(Action(Kind.W, action.stage, action.microbatch))
            elif weights[rank]:
                action = weights[rank].popleft()
                live[rank] -= 1
            else:
                continue
            order.append(action)
        there.update(made)
    return Schedule(name, tuple(map(tuple, orders)), num_microbatches, v_placement(num_ranks))


def _require_v(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int) -> None:
    require_counts(num_ranks, num_microbatches, num_virtual_stages)
    if num_virtual_stages != 2:
        raise ScheduleError(
            f"{name} runs two virtual stages on each rank, got num_virtual_stages={num_virtual_stages}; "
            f"use num_virtual_stages=2, or zero_bubble for one and interleaved_zero_bubble for any number"
        )
