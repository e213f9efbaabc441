"""One clock for all ranks, so that what they record can be laid side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.transport import Transport

_EXCHANGES = 5

Gather = Callable[..., Sequence[Sequence[float]]]
"""Called with numbers on every rank of some, gives each rank's, on all of them."""


def clock_offset(transport: Transport | None, replicas: Replicas | None = None) -> float:
    """Seconds by which this rank's `time.perf_counter` is ahead of rank 0's.

    Without `replicas`, ahead of the first rank's in this pipeline. All ranks must call it.
    """
    offset = _ahead(_gather_in(transport)) if transport is not None else 0.0
    if replicas is not None:  # by way of the same stage of the first replica
        offset = _ahead(replicas.gather_numbers) + replicas.gather_numbers(offset)[0][0]
    return offset


def _ahead(gather: Gather) -> float:
    """Seconds by which this rank's clock is ahead of that of the first one in `gather`.

    Nobody leaves an exchange before everybody has come to it: so this rank leaves after the first one came, and the
    first one leaves after this rank came, which bounds the difference of the clocks from both sides. Processes of one
    machine have one clock, and clocks of two machines hardly ever agree: where the bounds allow zero, it is zero.
    """
    low, high = -math.inf, math.inf
    came, left = 0.0, math.inf
    for _ in range(_EXCHANGES):
        came_before, came = came, time.perf_counter()
        first_came, first_left_before = gather(came, left)[0]
        left = time.perf_counter()
        high = min(high, left - first_came)
        low = max(low, came_before - first_left_before)
    return 0.0 if low <= 0 <= high else (low + high) / 2


def _gather_in(transport: Transport) -> Gather:
    def gather(*numbers: float) -> Sequence[Sequence[float]]:
        own = torch.tensor(numbers, dtype=torch.float64)
        return [row.tolist() for row in transport.all_gather_vector(own, "the time")]

    return gather
