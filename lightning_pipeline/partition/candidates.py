"""Which calls of modules a step can be cut at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_pipeline.partition.trace import Call, Trace


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
