"""What lies where in an autograd graph: on the way from its roots to its inputs, and beside it.

    root --> * --> * --> * --> input
             |     |
             v     v
            leaf   . --> leaf

A `*` is on the way to an input. One with edges to what is not is a *junction*, and each of these edges a *branch*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

LEAF = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
"""The type of the node that adds to a leaf's `.grad`."""


@dataclass(slots=True, eq=False)
class Region:
    """Nodes beside the way that lead to common leaves.

    Attributes:
        entered_from: a junction, or the root, that leads here.
        shared: there are others.
        mixed: a branch of several that end here begins at a node to which another node of the region leads, too. What
            comes from both is then added up in another order, unless all of it runs at once.
        leaves: the leaves.
        part_of: the region that this one turned out to be a part of.
    """

    entered_from: Node
    shared: bool = False
    mixed: bool = False
    leaves: list[GradientEdge] = field(default_factory=list)
    part_of: Region | None = None

    def whole(self) -> Region:
        """The region that this one is now a part of."""
        region = self
        while region.part_of is not None:
            region = region.part_of
        return region

    def absorb(self, other: Region) -> None:
        """Make `other` a part of this one."""
        self.shared |= other.shared or other.entered_from is not self.entered_from
        self.leaves += other.leaves
        other.part_of = self


@dataclass(slots=True, eq=False)
class Branch:
    """The edge number `index` of a junction, into a region."""

    index: int
    edge: GradientEdge
    region: Region


class Walk:
    """One walk over a graph.

    Args:
        roots: where backward starts.
        inputs: where the walk ends, besides at leaves.
    """

    def __init__(self, roots: Sequence[Node], inputs: set[Node]) -> None:
        self.leads: dict[Node, bool | None] = dict.fromkeys(inputs, True)
        """Whether a node leads to an input."""
        self.edges: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        """Edges of all nodes but the inputs'."""
        self.junctions: dict[Node, list[Branch]] = {}
        self.root_regions: dict[Node, Region] = {}
        """Regions of the roots that lead to no input."""
        self._regions: dict[Node, Region] = {}
        self._parents: dict[Node, list[Node]] = {}
        self._told: set[Node] = set()
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
        """The nodes through which backward has to go before `node`; each is told once."""
        found: list[Node] = []
        stack = [node]
        while stack:
            for parent in self._parents.get(stack.pop(), ()):
                if parent not in self._told:
                    self._told.add(parent)
                    found.append(parent)
                    stack.append(parent)
        return found

    def passed_last(self) -> list[Node]:
        """The other nodes on the way."""
        return [node for node in self.edges if self.leads[node] and node not in self._told]

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
        """The region of `node`, to which `source` leads."""
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
