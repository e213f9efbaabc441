"""What each part of a step costs, measured or estimated: the input of the search for the best cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_pipeline.partition import tree
from lightning_pipeline.planning.cost_model import Segment
from lightning_pipeline.planning.observing import Step
from lightning_pipeline.planning.trace import Call, DeviceSpeed, Trace, trace_step


@dataclass(eq=False, slots=True)
class Node:
    """A call that a stage can begin with, and those inside of it."""

    call: Call
    children: list[Node] = field(default_factory=list)


def cut_tree(root: nn.Module, trace: Trace) -> list[Node]:
    """The outermost calls that a stage can begin with, in order; others are their children.

    A stage can begin with a module that is called once, from forwards of modules that it is inside of and that are
    called once, too. It has parameters, or is the first that its caller calls. In a list, those after it are not called
    before it: they carry its stage as their lowest. Where elements of a list are left out at random, it is not inside
    of one: then the element after that one begins the stage, which nobody could tell of a part of it.
    """
    counts = Counter(trace.names)
    modules = dict(root.named_modules())
    first: dict[str, int] = {}  # the first call of a module, or of one inside of it
    for call in trace.calls:
        name = call.name
        while name:
            first.setdefault(name, call.start)
            name = name.rpartition(".")[0]
    lists_with_gaps = {name.rpartition(".")[0] for name in trace.optional}
    firsts_inside: set[tuple[str, ...]] = set()
    nodes: dict[str, Node] = {}
    outermost: list[Node] = []
    for call in trace.calls:
        opens = call.callers not in firsts_inside
        firsts_inside.add(call.callers)
        module = modules[call.name]
        if (
            counts[call.name] > 1
            or call.in_function
            or any(counts[caller] > 1 or not call.name.startswith(f"{caller}.") for caller in call.callers)
            or any(caller.rpartition(".")[0] in lists_with_gaps for caller in call.callers)
            or not (opens or next(module.parameters(), None) is not None)
            or (hasattr(module, "update") and hasattr(module, "compute"))
            or _is_overtaken(call, modules, first)
        ):
            continue
        node = nodes[call.name] = Node(call)
        around = next((nodes[caller] for caller in reversed(call.callers) if caller in nodes), None)
        (outermost if around is None else around.children).append(node)
    return outermost


def frontier(nodes: Sequence[Node], times: Sequence[float], largest: float) -> list[Call]:
    """Calls none of which is inside of another: those that take more than `largest` are replaced by those inside.

    Args:
        times: of each position.
    """
    found: list[Call] = []
    for node in nodes:
        if node.children and sum(times[node.call.start : node.call.end]) > largest:
            found += frontier(node.children, times, largest)
        else:
            found.append(node.call)
    return found


def _is_overtaken(call: Call, modules: dict[str, nn.Module], first: dict[str, int]) -> bool:
    """Whether a later element of a list around it is called before it."""
    parent, _, last = call.name.rpartition(".")
    if not isinstance(modules[parent], (nn.ModuleList, nn.Sequential)):
        return False
    siblings = [name for name, _ in modules[parent].named_children()]
    later = [f"{parent}.{name}" if parent else name for name in siblings[siblings.index(last) + 1 :]]
    return any(first.get(sibling, call.start) < call.start for sibling in later)


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


def estimate_step(root: nn.Module, step: Step, batch: Any, speed: DeviceSpeed) -> StepCosts:
    """Trace a step, and its backward, on fake tensors; parameters may be on the meta device, and stay as they are.

    Raises:
        ValueError: the step needs values of tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _fake(root):
        fake = tree.replace(batch, _like)
        try:
            trace = trace_step(root, step, fake, speed)
        except RuntimeError as error:
            raise ValueError(
                f"the step cannot be estimated, as it needs values of tensors ({type(error).__name__}: {error}): name "
                f"the cut in stage_config, or let a run measure it"
            ) from error
        times = [[work.seconds for work in way] for way in (trace.forward, trace.backward)]
        return StepCosts(root, trace, times[0], times[1], is_measured=False)


@contextmanager
def _fake(root: nn.Module) -> Iterator[None]:
    """Under the mode: parameters and buffers are fake ones on the CPU."""
    made: dict[int, Tensor] = {}
    swapped: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in root.modules():
        homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in homes:
            swapped += [(slots, key, tensor) for key, tensor in slots.items() if tensor is not None]
    for slots, key, tensor in swapped:
        if id(tensor) not in made:
            fake = _like(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        slots[key] = made[id(tensor)]
    try:
        yield
    finally:
        for slots, key, tensor in swapped:
            slots[key] = tensor


def _like(tensor: Tensor) -> Tensor:
    """Under the mode: a fake tensor on the CPU. The mode does not see `tensor`, as it would keep weak references."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
