"""What each part of a step costs: the input of a search for the best cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import nn

from lightning_pipeline.partition.candidates import Node, cut_tree, frontier
from lightning_pipeline.partition.trace import Call, Trace
from lightning_pipeline.schedules.balance import Segment


@dataclass(frozen=True)
class StepCosts:
    """A traced step with the time of each of its positions.

    Attributes:
        forward: seconds of one micro-batch, by position.
        backward: likewise.
        is_measured: the times are of the device itself, and not estimated.
        step: the user's name for the step.
    """

    root: nn.Module
    trace: Trace
    forward: Sequence[float]
    backward: Sequence[float]
    is_measured: bool
    step: str = "training_step"

    @property
    def both_ways(self) -> list[float]:
        """Seconds of forward, then those of backward, by position."""
        return [*self.forward, *self.backward]

    @property
    def times(self) -> list[float]:
        """Seconds of forward and backward, by position."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    def tree(self) -> list[Node]:
        """What a stage can begin with."""
        return cut_tree(self.root, self.trace)

    def candidates(self, largest: float, tree: list[Node] | None = None) -> list[Call]:
        """Calls to cut at, such that as few as possible take more than this share of the step."""
        times = self.times
        return frontier(self.tree() if tree is None else tree, times, largest * sum(times))

    def segments(self, calls: Sequence[Call], state_bytes: Callable[[str], float]) -> list[Segment]:
        """The step between these calls, in order; the first segment begins with the step.

        Args:
            state_bytes: bytes that a parameter of this name takes with its gradient and optimizer state.
        """
        bounds = [0, *(call.start for call in calls), self.trace.num_positions]
        sends, returns, counts = self._crossing()
        kept = [0.0, *accumulate(self.trace.kept)]
        names = ["", *(call.name for call in calls)]
        found = []
        for index, name in enumerate(names):
            positions = range(bounds[index], bounds[index + 1])
            used = dict.fromkeys(key for position in positions for key in self.trace.parameters[position])
            found.append(
                Segment(
                    name=name,
                    forward=sum(self.forward[p] for p in positions),
                    backward=sum(self.backward[p] for p in positions),
                    received=sends[bounds[index]] if index else 0.0,
                    returned=returns[bounds[index]] if index else 0.0,
                    messages=int(counts[bounds[index]]) if index else 0,
                    kept=kept[bounds[index + 1]] - kept[bounds[index]],
                    forward_peak=max(self.trace.forward_peak[p] for p in positions) - kept[bounds[index]],
                    backward_peak=max(self.trace.backward_peak[p] for p in positions) - kept[bounds[index]],
                    state={key: state_bytes(key) for key in used},
                    flops=sum(self.trace.forward[p].flops for p in positions)
                    + sum(work.flops for p in positions for work in self.trace.backward[p : p + 1]),
                )
            )
        return found

    def _crossing(self) -> tuple[list[float], list[float], list[float]]:
        """Bytes that a cut before each position sends on, those that come back as gradients, and how many values.

        A value is sent over every cut between where it is made and where it is used last.
        """
        size = self.trace.num_positions + 1
        sends, returns, counts = [0.0] * size, [0.0] * size, [0.0] * size
        for value in self.trace.values:
            sends[value.made + 1] += value.num_bytes
            sends[value.used + 1] -= value.num_bytes
            counts[value.made + 1] += 1
            counts[value.used + 1] -= 1
            if value.has_gradient:
                returns[value.made + 1] += value.num_bytes
                returns[value.used + 1] -= value.num_bytes
        return list(accumulate(sends)), list(accumulate(returns)), list(accumulate(counts))


def between(one: StepCosts, other: StepCosts, share: float) -> StepCosts:
    """The costs of a micro-batch whose size lies between those of two measurements: 0 is `one`'s size, 1 `other`'s."""
    if share in (0.0, 1.0) or one.trace.names != other.trace.names:
        return other if share == 1.0 else one

    def mixed(a: float, b: float) -> float:
        return a + (b - a) * share

    trace = replace(one.trace)
    for name in ("kept", "forward_peak", "backward_peak"):
        setattr(trace, name, list(map(mixed, getattr(one.trace, name), getattr(other.trace, name))))
    if len(one.trace.values) == len(other.trace.values):
        num_bytes = map(mixed, (v.num_bytes for v in one.trace.values), (v.num_bytes for v in other.trace.values))
        trace.values = [replace(v, num_bytes=size) for v, size in zip(one.trace.values, num_bytes, strict=True)]
    forward = list(map(mixed, one.forward, other.forward))
    backward = list(map(mixed, one.backward, other.backward))
    return replace(one, trace=trace, forward=forward, backward=backward)
