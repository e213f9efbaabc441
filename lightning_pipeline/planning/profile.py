"""The profile of a step: what each part of it takes, where a stage can begin, and what crosses a cut there.

A step is a row of *positions*: one begins with the step, and one with every call of a module. What happens in the
forward is noted under the position where it happens, and what happens in the backward under the position whose forward
it belongs to::

    training_step          position 0  ""
      encoder(x)           position 1  "encoder", which ends after position 3
        encoder.0(x)       position 2  "encoder.0"
        encoder.1(x)       position 3  "encoder.1"
      head(x)              position 4  "head", and the rest of the step

A candidate for a cut is a position; the segments between some candidates are what the search deals with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from torch import nn

from lightning_pipeline.planning.cost_model import Segment, join


@dataclass(slots=True)
class Position:
    """From the beginning of a module's call to that of the next call.

    Attributes:
        name: the module's name; empty for the step's beginning.
        start: the position's own number.
        end: the number after the last position inside of the call.
        callers: names of the modules from whose forwards it is called, the outermost first.
        in_function: it runs inside of an autograd.Function.
        inputs: shapes of the tensors it is called with.
        parameters: names of parameters that are used here, in the order of their first use.
        kept: bytes that are first kept for backward here.
        forward_peak: the most bytes that the step's tensors take at once during the forward here, from the step's
            beginning on; parameters and their gradients do not count.
        backward_peak: likewise during the backward.
    """

    name: str
    start: int
    end: int
    callers: tuple[str, ...] = ()
    in_function: bool = False
    inputs: tuple[tuple[int, ...], ...] = ()
    parameters: dict[str, None] = field(default_factory=dict)
    forward: float = 0.0
    backward: float = 0.0
    flops: float = 0.0
    kept: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0


@dataclass(slots=True)
class Value:
    """A tensor that the step makes: its size and the positions where it is made and last used."""

    made: int
    used: int
    num_bytes: float
    has_gradient: bool


@dataclass
class Profile:
    """The costs of a step on one micro-batch.

    Attributes:
        positions: in the order of the forward.
        optional: names of modules that other runs of the step leave out, or call in addition.
    """

    root: nn.Module
    positions: list[Position] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    optional: set[str] = field(default_factory=set)
    is_measured: bool = False
    step: str = "training_step"

    @property
    def calls(self) -> list[Position]:
        """The positions that begin with a call."""
        return self.positions[1:]

    @property
    def seconds(self) -> float:
        """Of forward and backward."""
        return self.time_of(0, len(self.positions))

    def time_of(self, start: int, end: int) -> float:
        """Seconds of forward and backward of these positions."""
        return sum(position.forward + position.backward for position in self.positions[start:end])

    def timed(self, forward: Sequence[float], backward: Sequence[float]) -> Profile:
        """This profile with measured times of each position."""
        both = zip(self.positions, forward, backward, strict=True)
        positions = [replace(position, forward=f, backward=b) for position, f, b in both]
        return replace(self, positions=positions, is_measured=True)

    @cached_property
    def beginnings(self) -> list[Position]:
        """The calls that a stage can begin with; some are inside of others.

        Such a module is called once, from forwards of modules that contain it and that are called once, too. It has
        parameters, or is the first that its caller calls. In a list, those after it are not called before it: they
        carry its stage as their lowest. Where elements of a list are left out at random, it is not inside of one: then
        the element after that one begins the stage, which could not be told from a part of it.
        """
        counts = Counter(call.name for call in self.calls)
        modules = dict(self.root.named_modules())
        first: dict[str, int] = {}  # the first call of a module, or of one inside of it
        for call in self.calls:
            name = call.name
            while name:
                first.setdefault(name, call.start)
                name = name.rpartition(".")[0]
        lists_with_gaps = {name.rpartition(".")[0] for name in self.optional}
        seen_callers: set[tuple[str, ...]] = set()
        found = []
        for call in self.calls:
            is_first_of_caller = call.callers not in seen_callers
            seen_callers.add(call.callers)
            module = modules[call.name]
            is_metric = hasattr(module, "update") and hasattr(module, "compute")
            if (
                counts[call.name] == 1
                and not call.in_function
                and all(counts[caller] == 1 and call.name.startswith(f"{caller}.") for caller in call.callers)
                and not any(caller.rpartition(".")[0] in lists_with_gaps for caller in call.callers)
                and (is_first_of_caller or next(module.parameters(), None) is not None)
                and not is_metric
                and not _is_overtaken(call, modules, first)
            ):
                found.append(call)
        return found

    def candidates(self, largest: float) -> list[Position]:
        """Calls to cut at, none inside of another: one that takes more than this share of the step gives way to those
        inside of it."""
        limit = largest * self.seconds
        found: list[Position] = []
        for call, following in zip_longest(self.beginnings, self.beginnings[1:]):
            if found and call.start < found[-1].end:
                continue  # inside of a candidate
            has_parts = following is not None and following.start < call.end
            if not has_parts or self.time_of(call.start, call.end) <= limit:
                found.append(call)
        return found

    def segments(self, calls: Sequence[Position], state_bytes: Callable[[str], float]) -> list[Segment]:
        """The step between these calls, in order; the first segment begins with the step.

        Args:
            state_bytes: bytes that a parameter of this name takes with its gradient and optimizer state.
        """
        kept_before = accumulate((position.kept for position in self.positions), initial=0.0)
        parts = [
            Segment(
                name=position.name,
                forward=position.forward,
                backward=position.backward,
                received=received,
                returned=returned,
                kept=position.kept,
                forward_peak=position.forward_peak - kept,
                backward_peak=position.backward_peak - kept,
                state={name: state_bytes(name) for name in position.parameters},
                flops=position.flops,
                messages=messages,
            )
            for position, kept, (received, returned, messages) in zip(
                self.positions, kept_before, self._crossing(), strict=False
            )
        ]
        return [join(parts[a:b]) for a, b in pairwise([0, *(call.start for call in calls), len(parts)])]

    def _crossing(self) -> list[tuple[float, float, int]]:
        """For each position, what a cut before it sends: bytes, bytes of gradients that come back, number of values.

        A value is sent over every cut between where it is made and where it is used last.
        """
        changes = [(0.0, 0.0, 0)] * (len(self.positions) + 1)
        for value in self.values:
            returned = value.num_bytes * value.has_gradient
            for index, sign in ((value.made + 1, 1), (value.used + 1, -1)):
                sends, returns, count = changes[index]
                changes[index] = (sends + sign * value.num_bytes, returns + sign * returned, count + sign)
        return [*accumulate(changes, lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] + b[2]))]


def _is_overtaken(call: Position, modules: dict[str, nn.Module], first: dict[str, int]) -> bool:
    """Whether a later element of a list around it is called before it."""
    parent, _, last = call.name.rpartition(".")
    if not isinstance(modules[parent], (nn.ModuleList, nn.Sequential)):
        return False
    siblings = [name for name, _ in modules[parent].named_children()]
    later = [f"{parent}.{name}" if parent else name for name in siblings[siblings.index(last) + 1 :]]
    return any(first.get(sibling, call.start) < call.start for sibling in later)


def between(one: Profile, other: Profile, share: float) -> Profile:
    """The profile of a micro-batch whose size lies between those of two others: 0 is `one`'s size, 1 `other`'s."""
    names = [[call.name for call in profile.calls] for profile in (one, other)]
    if share in (0.0, 1.0) or names[0] != names[1]:
        return other if share == 1.0 else one

    def mixed(a: Any, b: Any, *amounts: str) -> Any:
        return replace(a, **{key: getattr(a, key) + (getattr(b, key) - getattr(a, key)) * share for key in amounts})

    amounts = ("forward", "backward", "flops", "kept", "forward_peak", "backward_peak")
    positions = [mixed(a, b, *amounts) for a, b in zip(one.positions, other.positions, strict=True)]
    values = one.values
    if len(one.values) == len(other.values):
        values = [mixed(a, b, "num_bytes") for a, b in zip(one.values, other.values, strict=True)]
    return replace(one, positions=positions, values=values)
