"""A backward in two halves: first the gradients of a stage's inputs, later those of its parameters.

The first half runs backward for the inputs alone, and keeps the gradients that arrive at each junction (`graph_walk`).
The second runs the junctions once more, for their branches alone, and then the branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_pipeline import _torch
from lightning_pipeline.recording.backward_calls import backward_from
from lightning_pipeline.recording.graph_walk import LEAF, Branch, Walk
from lightning_pipeline.recording.recomputation import Saved
from lightning_pipeline.recording.saved_tensors import saved_names


def let_go(nodes: Iterable[Node]) -> None:
    """Free the tensors that nodes have saved. The nodes cannot run again."""
    for node in nodes:
        for name, _ in saved_names(type(node)):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (list, tuple)) else (saved,):
                _let_go(one)


def _let_go(saved: Any) -> None:
    packed = getattr(saved, "data", None)
    if isinstance(packed, Saved):
        packed.let_go()
    elif isinstance(packed, Tensor) and saved.unpack_hook is None:  # with hooks of the user's, it stays
        saved.register_hooks(_nothing, _gone)


def _nothing(_: Tensor) -> None:
    return None


def _gone(_: None) -> Tensor:
    raise RuntimeError("trying to run backward through the same graph a second time, after a part of it was freed")


Gradients = tuple[Tensor | None, ...]

_AT_ONCE = 4
"""Junctions that the second half runs at once: more are faster, fewer hold less memory."""


class SplitBackward:
    """Backward from `roots` in two halves, which add bit for bit what one backward adds to `.grad`.

    Hooks run once: those on the way to the inputs in the first half, the others in the second.

    Args:
        gradients: the gradient of each root; None for a scalar.
        inputs: edges of the received values, taken when these entered the graph: leaves, or results of one
            autograd.Function. Their nodes do not run. If the graph cannot be split, all of backward runs in the first
            half.
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
        """The first half: the gradient of each input; None where there is none."""
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
            # As backward runs them.
            for node in sorted(walk.junctions, key=lambda node: node._sequence_nr(), reverse=True)
            if (left := [branch for branch in walk.junctions[node] if not branch.region.mixed])
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
                junction.frees([])  # to break the cycle: these nodes own the hook through the graph
        later = [not early for early in now]
        self._roots, self._gradients = list(compress(roots, later)), list(compress(gradients, later))
        for leaf, gradient in zip(leaves, found[len(inputs) :], strict=True):
            if gradient is not None:
                self._roots.append(leaf)
                self._gradients.append(gradient)
        let_go(node for node in walk.passed_last() if node not in again)
        return found[: len(inputs)]

    def weight_gradients(self) -> None:
        """The second half: add the leaves' gradients to their `.grad`, and free the graph.

        Gradients are as nodes return them, which may have to be expanded or cast, as the engine does between nodes.
        """
        starts, gradients, junctions = self._roots, self._gradients, self._junctions
        self._roots, self._gradients, self._junctions = [], [], []
        junctions.reverse()  # so that each is freed as it is popped
        while junctions:
            some = [junctions.pop() for _ in range(min(_AT_ONCE, len(junctions)))]
            own: list[GradientEdge] = []
            own_gradients: list[Tensor] = []
            for branch, gradient in _through_junctions(some):
                (starts if branch.region.shared else own).append(branch.edge)
                (gradients if branch.region.shared else own_gradients).append(gradient)
            if own:
                backward_from(own, own_gradients)
        if starts:
            backward_from(starts, gradients)


def _one_for(root: Tensor | GradientEdge) -> Tensor:
    if isinstance(root, Tensor) and root.numel() == 1:
        return torch.ones_like(root)
    what = f"a tensor of shape {tuple(root.shape)}" if isinstance(root, Tensor) else "a gradient edge"
    raise ValueError(f"backward starts at {what} and got None for its gradient, which only a scalar tensor may have")


class _Junction:
    """A junction, with those of its branches that the second half runs."""

    def __init__(self, node: Node, branches: list[Branch]) -> None:
        self.node = node
        self.branches = branches
        self.is_function = isinstance(node, BackwardCFunction)
        self._visit = _Visit()
        if self.is_function:  # it always computes all of its gradients, so it need not run again
            self._hook = node.register_hook(self._visit.after)
        else:
            self._hook = node.register_prehook(self._visit.before)

    def frees(self, nodes: list[Node]) -> None:
        """Free what `nodes` saved once the first half has arrived here."""
        self._visit.done = nodes

    def run(self) -> Gradients:
        """Compute the gradients of the branches. Called in a backward for them."""
        self._hook.remove()
        kept, self._visit.gradients = self._visit.gradients, ()
        if not kept:
            return (None,) * len(self.branches)  # the first half did not arrive here
        found = kept
        if not self.is_function:
            found = self.node(*kept)  # type: ignore[operator]
            if not isinstance(found, tuple):
                found = (found,)
            let_go((self.node,))
        return tuple(found[branch.index] for branch in self.branches)


class _Visit:
    """The hook of the first half at a junction. It must not refer to the node, which owns it."""

    def __init__(self) -> None:
        self.gradients: Gradients = ()
        self.done: list[Node] = []

    def before(self, gradients: Gradients) -> None:
        """Keep the gradients that arrive at the node."""
        self.gradients = gradients
        let_go(self.done)

    def after(self, gradients: Gradients, _: Gradients) -> None:
        """Keep the gradients that leave the node."""
        self.before(gradients)


def _through_junctions(junctions: list[_Junction]) -> list[tuple[Branch, Tensor]]:
    """The gradients of the junctions' branches.

    A node computes the gradients of only those edges that the running backward needs. A backward from the junction
    would walk all of the graph below it. So a backward for the branches starts at a tensor of its own, and the
    junctions are called in a hook of that tensor.
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


@contextmanager
def _without_hooks(edges: list[GradientEdge]) -> Iterator[None]:
    """Remove the hooks of the leaves among `edges` while entered: they run when the gradients are added."""
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
    """Run all of backward. Returns the gradients of `inputs`."""
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
    """Whether a node can run for some of its edges first, and for the others later."""
    name = type(node).__name__
    if name == "CheckpointFunctionBackward":  # runs a backward of its own, which needs one for all leaves
        return False
    if name == "CompiledFunctionBackward":  # may reuse the memory of what it saved
        return not _torch.donates_buffers()
    return True
