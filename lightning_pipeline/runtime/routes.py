"""Which streams of tensors there are, and between which stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class Channel(IntEnum):
    """Streams of tensors that do not wait for one another."""

    FORWARD = 0  # activations
    BACKWARD = 1  # gradients
    BATCH = 2  # batch tensors, from stage 0
    SHARED = 3  # parameters that several stages hold, and their gradients


class Route(NamedTuple):
    """One direction of a channel between two stages."""

    channel: Channel
    source: int
    destination: int


def routes_along(placement: Sequence[int]) -> list[Route]:
    """The routes of a pipeline whose data passes these ranks, one virtual stage after another."""
    routes = set()
    for source, destination in itertools.pairwise(placement):
        if source != destination:
            routes.add(Route(Channel.FORWARD, source, destination))
            routes.add(Route(Channel.BACKWARD, destination, source))
    for rank in range(1, max(placement) + 1):
        routes.add(Route(Channel.BATCH, 0, rank))
        for other in range(rank):
            routes.add(Route(Channel.SHARED, other, rank))
            routes.add(Route(Channel.SHARED, rank, other))
    return sorted(routes)
