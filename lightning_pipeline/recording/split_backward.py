"""A backward in two parts: first the gradients of a stage's inputs, later those of its parameters.

The first part runs backward for the inputs alone, and keeps what came to each junction (see `graph_walk`). The second
runs the junctions once more, for their branches alone, and then the branches.

What lies where in an autograd graph: on the way from its roots to its inputs, and beside it.

    root --> * --> * --> * --> input
             |     |
             v     v
            leaf   . --> leaf

A `*` is on the way to an input. One with edges to what is not is a *junction*, and each of these edges a *branch*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge
from torch.autograd.variable import Variable

from lightning_pipeline.recording.recomputation import Place


def backward_from(
    roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None], *, retain_graph: bool = False
) -> None:
    """What `torch.autograd.backward` comes to where each root has a gradient of its own shape and dtype.

    It makes sure of that first, which takes as long as a small layer's backward; gradients that another stage sent are
    what was asked for.
    """
    _engine_run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_from_loss(loss: Tensor, *, retain_graph: bool = False) -> None:
    """What ``loss.backward()`` comes to for a loss without dimensions."""
    if type(loss) is Tensor and loss.is_floating_point():
        backward_from((loss,), (torch.ones_like(loss),), retain_graph=retain_graph)
    else:
        loss.backward(retain_graph=retain_graph)


class CaughtGradient:
    """What comes to a leaf in backward instead of its `.grad`, which would have the leaf's strides: as it is.

    Attributes:
        gradient: the sum of it.
    """

    __slots__ = ("_cell", "_node")

    def __init__(self, leaf: Tensor) -> None:
        self._cell: list[Tensor | None] = [None]  # and not this object, which owns the node that owns the hook
        self._node = get_gradient_edge(leaf).node
        self._node.register_prehook(partial(_catch, self._cell))

    @property
    def gradient(self) -> Tensor | None:
        return self._cell[0]

    def clear(self) -> None:
        """Forget what has come."""
        self._cell[0] = None

    @staticmethod
    @contextmanager
    def paused() -> Iterator[None]:
        """While entered, gradients go on past where they are caught, as for `torch.autograd.grad`."""
        _PAUSED.append(True)
        try:
            yield
        finally:
            _PAUSED.pop()


@contextmanager
def caught(leaves: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """While entered, what comes to leaves in backward goes into the list that is given, as with `CaughtGradient`."""
    nodes: list[Node] = [get_gradient_edge(leaf).node for leaf in leaves]
    cells: list[list[Tensor | None]] = [[None] for _ in leaves]
    hooks = [node.register_prehook(partial(_catch, cell)) for node, cell in zip(nodes, cells, strict=True)]
    found: list[Tensor | None] = []
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found.extend(cell[0] for cell in cells)


_PAUSED: list[bool] = []


def _catch(cell: list[Tensor | None], gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None]:
    [gradient] = gradients
    if _PAUSED:
        return (gradient,)
    if gradient is not None:
        cell[0] = gradient if cell[0] is None else cell[0] + gradient
    return (None,)


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


def let_go(nodes: Iterable[Node]) -> None:
    """Free what `nodes` have saved; they cannot run again."""
    for node in nodes:
        for name in _names(type(node)):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (list, tuple)) else (saved,):
                _let_go(one)


def _let_go(saved: Any) -> None:
    packed = getattr(saved, "data", None)
    if isinstance(packed, Place):
        packed.let_go()
    elif isinstance(packed, Tensor) and saved.unpack_hook is None:  # one with hooks of the user's stays
        saved.register_hooks(_nothing, _gone)


@cache
def _names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _nothing(_: Tensor) -> None:
    return None


def _gone(_: None) -> Tensor:
    raise RuntimeError("trying to run backward through the same graph a second time, after a part of it was freed")


Gradients = tuple[Tensor | None, ...]

_AT_ONCE = 4
"""Junctions that the second part runs before it adds to `.grad`: as many as keep it quick, as few as memory wants."""


class SplitBackward:
    """Backward from `roots`, in two parts: what it adds to `.grad` is to the bit what one backward adds.

    Hooks run once: those on leaves and beside the way in the second part, those on the way in the first.

    Args:
        roots: where backward starts.
        gradients: the gradient there, each; None for a scalar.
        inputs: the received values, from `get_gradient_edge` when they entered the graph: leaves, or results of one
            autograd.Function. Their nodes do not run, unless the graph cannot be split: then all of backward is in the
            first part.
    """

    def __init__(
        self,
        roots: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[GradientEdge],
    ) -> None:
        self._roots = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
        self._gradients = [
            _one_for(root) if gradient is None else gradient for root, gradient in zip(roots, gradients, strict=True)
        ]
        self._inputs = list(inputs)
        self._junctions: list[_Junction] = []

    def input_gradients(self) -> Gradients:
        """The first part: the gradient of each input, None where none comes to it."""
        inputs, self._inputs = self._inputs, []
        roots, gradients = self._roots, self._gradients
        if not inputs:
            return ()
        walk = Walk([root.node for root in roots], {edge.node for edge in inputs})
        if not any(walk.leads[root.node] for root in roots):
            return (None,) * len(inputs)
        if not all(map(_can_run_twice, walk.edges)):
            self._roots, self._gradients = [], []
            return _run_whole(roots, gradients, inputs)
        regions = [branch.region for branches in walk.junctions.values() for branch in branches]
        leaves = [leaf for region in dict.fromkeys(regions) if region.mixed for leaf in region.leaves]
        self._junctions = [
            _Junction(node, left)
            for node, branches in sorted(walk.junctions.items(), key=_made_at, reverse=True)  # as backward runs them
            if (left := [branch for branch in branches if not branch.region.mixed])
        ]
        again = {junction.node for junction in self._junctions if not junction.is_function}
        for junction in self._junctions:
            junction.frees([node for node in walk.passed_before(junction.node) if node not in again])
        region_of = walk.root_regions
        now = [root.node not in region_of or region_of[root.node].mixed for root in roots]
        try:
            with _without_hooks(leaves):
                found = torch.autograd.grad(
                    list(compress(roots, now)),
                    [*inputs, *leaves],
                    list(compress(gradients, now)),
                    retain_graph=True,
                    allow_unused=True,
                )
        finally:
            for junction in self._junctions:
                junction.frees([])  # as these nodes own the hook by way of the graph
        later = [not early for early in now]
        self._roots, self._gradients = list(compress(roots, later)), list(compress(gradients, later))
        for leaf, gradient in zip(leaves, found[len(inputs) :], strict=True):
            if gradient is not None:
                self._roots.append(leaf)
                self._gradients.append(gradient)
        let_go(node for node in walk.passed_last() if node not in again)
        return found[: len(inputs)]

    def weight_gradients(self) -> None:
        """The second part: add the leaves' gradients to their `.grad`, and let go of the graph."""
        starts, gradients, junctions = self._roots, self._gradients, self._junctions
        self._roots, self._gradients, self._junctions = [], [], []
        junctions.reverse()  # to take them off the end, and their memory with them
        while junctions:
            some = [junctions.pop() for _ in range(min(_AT_ONCE, len(junctions)))]
            own: list[GradientEdge] = []
            own_gradients: list[Tensor] = []
            for branch, gradient in _through_junctions(some):
                (starts if branch.region.shared else own).append(branch.edge)
                (gradients if branch.region.shared else own_gradients).append(gradient)
            _run_branches(own, own_gradients)
        _run_branches(starts, gradients)


def _made_at(junction: tuple[Node, list[Branch]]) -> int:
    return junction[0]._sequence_nr()


def _one_for(root: Tensor | GradientEdge) -> Tensor:
    if isinstance(root, Tensor) and root.numel() == 1:
        return torch.ones_like(root)
    what = f"a tensor of shape {tuple(root.shape)}" if isinstance(root, Tensor) else "a gradient edge"
    raise ValueError(f"backward starts at {what} and got None for its gradient, which only a scalar tensor may have")


class _Junction:
    """A junction, and the branches that are left to do."""

    def __init__(self, node: Node, branches: list[Branch]) -> None:
        self.node = node
        self.branches = branches
        self.is_function = isinstance(node, BackwardCFunction)
        self._visit = _Visit()
        if self.is_function:  # it computes all of its gradients, whatever is asked for, so that it is not run again
            self._hook = node.register_hook(self._visit.after)
        else:
            self._hook = node.register_prehook(self._visit.before)

    def frees(self, nodes: list[Node]) -> None:
        """Have what `nodes` saved freed when the first part comes here."""
        self._visit.done = nodes

    def run(self) -> Gradients:
        """The gradients of the branches, in a backward for these."""
        self._hook.remove()
        kept, self._visit.gradients = self._visit.gradients, ()
        if not kept:
            return (None,) * len(self.branches)  # the first part did not come here
        found = kept
        if not self.is_function:
            found = self.node(*kept)  # type: ignore[operator]
            if not isinstance(found, tuple):
                found = (found,)
            let_go((self.node,))
        return tuple(found[branch.index] for branch in self.branches)


class _Visit:
    """What the first part does at a junction. It does not know the node, which owns it as a hook."""

    def __init__(self) -> None:
        self.gradients: Gradients = ()
        self.done: list[Node] = []

    def before(self, gradients: Gradients) -> None:
        """Keep what comes to the node."""
        self.gradients = gradients
        let_go(self.done)

    def after(self, gradients: Gradients, _: Gradients) -> None:
        """Keep what comes out of the node."""
        self.before(gradients)


def _through_junctions(junctions: list[_Junction]) -> list[tuple[Branch, Tensor]]:
    """The gradients of the junctions' branches.

    A node computes the gradients of those of its edges that the present backward needs. A backward from a junction
    would look at all of the graph below it; so this is one for the branches from somewhere else, and in a hook of it
    the junctions run, by themselves.
    """
    found: list[tuple[Branch, Tensor]] = []

    def run(_: Tensor) -> None:
        for junction in junctions:
            gradients = zip(junction.branches, junction.run(), strict=True)
            found.extend((branch, gradient) for branch, gradient in gradients if gradient is not None)

    start = torch.zeros((), requires_grad=True)
    start.register_hook(run)
    wanted = [branch.edge for junction in junctions for branch in junction.branches if not junction.is_function]
    torch.autograd.grad(start, [get_gradient_edge(start), *wanted], torch.ones(()), allow_unused=True)
    return found


def _run_branches(starts: list[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Backward from `starts`, where gradients are as nodes return them: of broadcast shapes, or another dtype.

    `torch.autograd.backward` would refuse these; the engine makes them fit as it does between nodes.
    """
    if starts:
        Variable._execution_engine.run_backward(
            tuple(starts), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


@contextmanager
def _without_hooks(edges: list[GradientEdge]) -> Iterator[None]:
    """While entered, no hooks are on the leaves among `edges`: theirs run when the gradients are added."""
    hooks = [edge.node.variable._backward_hooks for edge in edges if type(edge.node) is LEAF]  # type: ignore[attr-defined]
    registered = [(of_leaf, dict(of_leaf)) for of_leaf in hooks if of_leaf]
    for of_leaf, _ in registered:
        of_leaf.clear()
    try:
        yield
    finally:
        for of_leaf, before in registered:
            of_leaf.update(before)


def _run_whole(roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[GradientEdge]) -> Gradients:
    """All of backward; returns the gradients of `inputs`."""
    found: list[Tensor | None] = [None] * len(inputs)

    def stop_at(places: list[int], gradients: Gradients) -> Gradients:
        for place in places:
            found[place] = gradients[inputs[place].output_nr]
        return (None,) * len(gradients)

    places: dict[Node, list[int]] = {}
    for place, edge in enumerate(inputs):
        places.setdefault(edge.node, []).append(place)
    hooks = [node.register_prehook(partial(stop_at, of_node)) for node, of_node in places.items()]
    try:
        torch.autograd.backward(roots, gradients)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(found)


def _can_run_twice(node: Node) -> bool:
    """Whether a node can run for some of its edges, and keep what it needs for the others."""
    name = type(node).__name__
    if name == "CheckpointFunctionBackward":  # runs a backward inside, and only in a backward for all leaves
        return False
    if name == "CompiledFunctionBackward":  # may reuse the memory of what it saved
        return not torch._functorch.config.donated_buffer
    return True
