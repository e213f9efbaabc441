"""Which activations wait in host memory, and when they go there and come back.

On the first of four ranks under 1F1B, an activation goes while the action after its forward runs, and comes back while
the one before its backward does. It is away during those between::

    actions           F4     B1     F5     B2     F6     B3     F7     B4
    micro-batch 4     made   goes   away   away   away   away   back   used

Of those that wait, the ones whose backward is farthest are sent, and no more than lower the rank's peak (selective
offload, as in "PipeOffload", Wan et al. 2025).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from lightning_pipeline.schedules.schedule import Action, Kind


class Away(NamedTuple):
    """An activation of a virtual stage that waits in host memory. Places count a rank's compute actions.

    Attributes:
        made: the place of its F.
        used: the place of its B or I.
    """

    stage: int
    microbatch: int
    made: int
    used: int

    @property
    def gone(self) -> int:
        """The first action during which it is not on the device."""
        return self.made + 2

    @property
    def back(self) -> int:
        """The action before which its memory on the device is allocated again."""
        return self.used - 1


def away_in(order: Sequence[Action]) -> list[Away]:
    """The activations of a rank that are sent to host memory, in the order of their forwards.

    There are none where sending any would not lower the most that the rank holds at once.
    """
    made: dict[tuple[int, int], int] = {}
    used: dict[tuple[int, int], int] = {}
    freed: dict[tuple[int, int], int] = {}
    for place, action in enumerate(order):
        key = action.stage, action.microbatch
        if action.kind is Kind.F:
            made[key] = place
        else:
            used.setdefault(key, place)
            freed[key] = place
    changes = [0] * (len(order) + 1)
    for key, place in made.items():
        changes[place] += 1
        changes[freed.get(key, place) + 1] -= 1
    waiting = [Away(*key, place, used[key]) for key, place in made.items() if key in used]
    waiting = [one for one in waiting if one.gone < one.back]
    for one in waiting:
        changes[one.gone] -= 1
        changes[one.back] += 1
    live = list(accumulate(changes))
    most = max(live, default=0)
    sent = []
    for one in sorted(waiting, key=lambda one: one.used - one.made):
        if max(live[one.gone : one.back]) < most:  # it may as well stay
            live[one.gone : one.back] = [count + 1 for count in live[one.gone : one.back]]
        else:
            sent.append(one)
    return sorted(sent, key=attrgetter("made"))


def by_place(some: Iterable[Away], place: str) -> dict[int, list[Away]]:
    """Grouped by the attribute `place`."""
    found: dict[int, list[Away]] = defaultdict(list)
    for one in some:
        found[getattr(one, place)].append(one)
    return found


def changes_of(order: Sequence[Action], sent: Sequence[float]) -> dict[int, float]:
    """By how much the bytes on a rank's device change before its actions, as some go and come back.

    Args:
        sent: bytes of a micro-batch that go to host memory, of each virtual stage; empty for none.
    """
    changes: dict[int, float] = defaultdict(float)
    for one in away_in(order) if sent else ():
        changes[one.gone] -= sent[one.stage]
        changes[one.back] += sent[one.stage]
    return changes


class HostLink:
    """A rank's transfers to host memory and back, on paper: one after another each way, beside the computation."""

    def __init__(self, order: Sequence[Action], seconds: Sequence[float]) -> None:
        some = away_in(order)
        self._made, self._gone = by_place(some, "made"), by_place(some, "gone")
        self._back, self._used = by_place(some, "back"), by_place(some, "used")
        self._seconds = seconds
        self._out = self._in = 0.0
        self._sent: dict[Away, float] = {}
        self._arrived: dict[Away, float] = {}
        self.waited = 0.0
        """Time that the rank could have computed in, but for a transfer."""

    def start(self, place: int, free: float, ready: float) -> float:
        """When the action at a place starts, of a rank that is free and has its inputs from these times on."""
        for one in self._back.get(place, ()):
            self._arrived[one] = self._in = max(self._in, self._sent[one], free) + self._seconds[one.stage]
        gone = (self._sent[one] for one in self._gone.get(place, ()))
        there = (self._arrived[one] for one in self._used.get(place, ()))
        start = max([free, ready, *gone, *there])
        self.waited += start - max(free, ready)
        return start

    def note_end(self, place: int, end: float) -> None:
        """The action at a place has ended."""
        for one in self._made.get(place, ()):
            self._sent[one] = self._out = max(self._out, end) + self._seconds[one.stage]


def describe_away(orders: Iterable[Sequence[Action]], peaks: Sequence[float], waited: Sequence[float]) -> str:
    """A line for each rank: whose activations it sends, and how many are live at once.

    Args:
        waited: for transfers to host memory and back, in the unit of the costs.
    """
    lines = []
    for rank, (order, peak, seconds) in enumerate(zip(orders, peaks, waited, strict=True)):
        away = [f"{one.stage}F{one.microbatch}" for one in away_in(order)]
        shown = away if len(away) <= _SHOWN else [*away[: _SHOWN // 2], "...", *away[-_SHOWN // 2 :]]
        told = f"rank {rank}: {peak:g} live at once, waits {seconds:.4g} for transfers to host memory and back"
        lines.append(f"{told}; there are {' '.join(shown)}" if away else f"{told}; nothing goes there")
    return "\n".join(lines)


_SHOWN = 12
