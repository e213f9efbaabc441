"""What lies where in an autograd graph: on the way from its roots to its inputs, and beside it.

::

    root --> * --> * --> * --> input
             |     |
             v     v
            leaf   . --> leaf

A `*` is on the way to an input. One with edges to what is not is a *junction*, and each of these edges a *branch*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

LEAF = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
"""The type of the node that adds to a leaf's `.grad`."""


def edges_before(
    made: Iterable[Tensor | GradientEdge], ends: Iterable[GradientEdge]
) -> Iterator[tuple[Node, int, GradientEdge]]:
    """The edges between what backward begins at and where its graph ends: the node, the place, the edge."""
    seen = {None, *(edge.node for edge in ends)}
    todo = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in made if _has_graph(one)]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        assert node is not None
        for place, (following, number) in enumerate(node.next_functions):
            if following is not None:
                yield node, place, GradientEdge(following, number)
                todo.append(following)


def _has_graph(one: Tensor | GradientEdge) -> bool:
    return isinstance(one, GradientEdge) or one.requires_grad


@dataclass(slots=True, eq=False)
class Region:
    """Nodes beside the way that lead to common leaves.

    Attributes:
        entered_from: a junction, or the root, that leads here.
        shared: whether several junctions lead here.
        mixed: whether a branch that leads here begins at a node that another node of the region leads to as well.
            Gradients from both would be summed in a different order unless all of the region runs at once.
        part_of: the region that has absorbed this one.
    """

    entered_from: Node
    shared: bool = False
    mixed: bool = False
    leaves: list[GradientEdge] = field(default_factory=list)
    part_of: Region | None = None

    def whole(self) -> Region:
        """The region that has absorbed this one in the end, or itself."""
        region = self
        while region.part_of is not None:
            region = region.part_of
        return region

    def absorb(self, other: Region) -> None:
        self.shared |= other.shared or other.entered_from is not self.entered_from
        self.leaves += other.leaves
        other.part_of = self


@dataclass(slots=True, eq=False)
class Branch:
    """Edge number `index` of a junction, which leads into a region."""

    index: int
    edge: GradientEdge
    region: Region


class Walk:
    """Finds the junctions and regions of an autograd graph.

    Args:
        inputs: where the walk ends, as it does at leaves.
    """

    def __init__(self, roots: Sequence[Node], inputs: set[Node]) -> None:
        self.leads: dict[Node, bool | None] = dict.fromkeys(inputs, True)
        """Whether each node leads to an input; None while that is unknown."""
        self.edges: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        """The edges of every node but the inputs."""
        self.junctions: dict[Node, list[Branch]] = {}
        self.root_regions: dict[Node, Region] = {}
        """The regions of roots that lead to no input."""
        self._regions: dict[Node, Region] = {}
        self._parents: dict[Node, list[Node]] = {}
        self._returned: set[Node] = set()
        for root in roots:
            self._visit(root)
        self._find_junctions()
        for root in roots:
            if not self.leads[root]:
                self.root_regions[root] = self._enter(root, root)
                self.root_regions[root].whole().shared = True
        self._find_mixed()
        for branch in (branch for branches in self.junctions.values() for branch in branches):
            branch.region = branch.region.whole()
        self.root_regions = {root: region.whole() for root, region in self.root_regions.items()}

    def passed_before(self, node: Node) -> list[Node]:
        """The nodes that backward passes before `node`, without those returned earlier."""
        found: list[Node] = []
        stack = [node]
        while stack:
            for parent in self._parents.get(stack.pop(), ()):
                if parent not in self._returned:
                    self._returned.add(parent)
                    found.append(parent)
                    stack.append(parent)
        return found

    def passed_last(self) -> list[Node]:
        """The nodes on the way that `passed_before` has not returned."""
        return [node for node in self.edges if self.leads[node] and node not in self._returned]

    def _visit(self, root: Node) -> None:
        leads, seen_edges = self.leads, self.edges
        stack = [root]
        while stack:
            node = stack[-1]
            if node not in leads:
                leads[node] = None
                edges = seen_edges[node] = node.next_functions
                for child, _ in edges:
                    if child is not None:
                        self._parents.setdefault(child, []).append(node)
                        if child not in leads:
                            stack.append(child)
            else:
                stack.pop()
                if leads[node] is None:
                    leads[node] = any(leads[child] for child, _ in seen_edges[node] if child is not None)

    def _find_junctions(self) -> None:
        leads = self.leads
        for node, edges in self.edges.items():
            if leads[node]:
                for index, (child, number) in enumerate(edges):
                    if child is not None and not leads[child]:
                        branch = Branch(index, GradientEdge(child, number), self._enter(node, child))
                        self.junctions.setdefault(node, []).append(branch)

    def _enter(self, source: Node, node: Node) -> Region:
        """The region of `node`, which `source` leads to."""
        regions = self._regions
        region = Region(source)
        stack = [node]
        while stack:
            node = stack.pop()
            known = regions.get(node)
            if known is None:
                regions[node] = region
                if type(node) is LEAF:
                    region.leaves.append(GradientEdge(node, 0))
                else:
                    stack += [child for child, _ in self.edges[node] if child is not None]
            elif known.whole() is not region:
                known = known.whole()
                known.absorb(region)
                region = known
        return region

    def _find_mixed(self) -> None:
        begins = {
            branch.edge.node: branch
            for branches in self.junctions.values()
            for branch in branches
            if branch.region.whole().shared
        }
        if begins:
            for node in self._regions:
                for child, _ in self.edges[node]:
                    if child in begins:
                        begins[child].region.whole().mixed = True
