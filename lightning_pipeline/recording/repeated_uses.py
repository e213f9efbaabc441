"""Parameters that several visits use, and whose gradients have to pass from visit to visit to add up as in one process.

One process adds the gradients of a parameter's uses one by one, from the last to the first. If each visit added up its
own uses, and their sums were added afterwards, the bits would differ::

    uses           visit 0: a, b      visit 1: c, d
    one process    ((d + c) + b) + a
    sums of each   (d + c) + (b + a)

So what the later visits have gives way to the earlier one's backward, which starts with it: `d + c` is a root of visit
0's backward. Where every visit but the last uses the parameter once, the sums of each are right already, and can be
exchanged at the end of the step (`engine.shared_parameters`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.event import Event

EXACT_BYTES = 1 << 20
"""Largest size of a parameter whose gradients pass between stages for each micro-batch. Those of larger ones are added
up on each stage first."""


def passed_on(events: Iterable[Event], placement: Sequence[int]) -> dict[int, tuple[TensorSpec, int]]:
    """The parameters whose gradients pass from visit to visit, by number, with the first visit that uses each."""
    uses: dict[int, Counter[int]] = {}
    specs: dict[int, TensorSpec] = {}
    others: set[int] = set()
    differentiated: set[int] = set()  # by torch.autograd.grad, which needs all uses on its visit in one strand
    latest: dict[int, int] = {}
    is_early: set[int] = set()  # used on an earlier visit than before
    for event in events:
        is_use = is_differentiable(event)
        for slot, value in enumerate(event.inputs):
            if type(value) is not int or value >= 0:
                continue
            spec = event.specs[slot]
            number = -1 - value
            if event.visit < latest.get(number, event.visit):
                is_early.add(number)
            latest[number] = max(event.visit, latest.get(number, event.visit))
            if event.function is torch.autograd.grad:
                differentiated.add(number)
            elif event.writes_into(slot) or not event.made():
                others.add(number)  # these, and hooks, mean the parameter itself
            elif not is_use and event.views(slot):
                others.add(number)  # it may be written into
            elif is_use and spec.requires_grad and spec.num_bytes <= EXACT_BYTES:
                specs[number] = spec
                uses.setdefault(number, Counter())[event.visit] += event.num_gradients(slot)
    others |= differentiated & is_early
    return {
        number: (specs[number], min(counts))
        for number, counts in uses.items()
        if number not in others and _need_order(counts, placement, comes_early=number in is_early)
    }


def is_differentiable(event: Event) -> bool:
    """Whether gradients go back through an event to what it uses."""
    return event.visit >= 0 and event.state[0] and event.gives_gradients()


def _need_order(counts: Counter[int], placement: Sequence[int], *, comes_early: bool) -> bool:
    """Whether sums of each rank's uses, added from the last rank to the first, are not what one process adds.

    Args:
        comes_early: an earlier visit uses the parameter after a later one.
    """
    ranks = [placement[visit % len(placement)] for visit in sorted(counts)]
    is_repeated = any(count > 1 for visit, count in counts.items() if comes_early or visit != max(counts))
    is_once_in_order = len(set(ranks)) == len(ranks) and (len(ranks) == 2 or ranks == sorted(ranks))
    return len(ranks) > 1 and (is_repeated or (len(set(ranks)) > 1 and not is_once_in_order))
