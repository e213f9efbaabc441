"""Leaves: the topmost modules that lie within one stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_pipeline.partition.compiled import is_compiled
from lightning_pipeline.partition.overrides import has_forward
from lightning_pipeline.partition.stage_map import StageMap, places


@dataclass(slots=True, eq=False)
class Leaf:
    """A topmost module whose subtree holds no boundary.

    Attributes:
        name: its qualified name (the first one, if it has several).
        stage: the stage that a key gives it; None if it runs where its input is.
        minimum: the lowest stage on which it may run, from a key before it in its list.
        has_key: the key names this module itself, and not one around it.
    """

    name: str
    module: nn.Module
    stage: int | None
    minimum: int | None
    has_key: bool = False


def find_leaves(root: nn.Module, stages: StageMap) -> list[Leaf]:
    """The leaves of `root`, in the order of its tree, without `root` itself and modules that cannot be called."""
    ancestors = {""}  # of modules with keys
    for name in (*stages.exact, *stages.minimum):
        while name := name.rpartition(".")[0]:
            ancestors.add(name)
    names_of = places(root)
    seen: set[int] = set()

    def leaves_in(module: nn.Module, prefix: str) -> Iterator[Leaf]:
        for child_name, child in module.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            name = prefix + child_name
            if name in ancestors or not (has_forward(child) or is_compiled(child)):
                yield from leaves_in(child, f"{name}.")
            else:
                yield _leaf(name, child, stages, names_of[id(child)])

    return list(leaves_in(root, ""))


def _leaf(name: str, module: nn.Module, stages: StageMap, names: Sequence[str]) -> Leaf:
    # A key of the module's own holds for all calls of it. A key around it holds only if the module has such keys in all
    # of its places, as the code of each place calls it.
    covering = {stages.exact[name]} if name in stages.exact else {stages.covering(place) for place in names}
    minima = [stages.at_least(place) for place in names]
    return Leaf(
        name,
        module,
        stage=covering.pop() if len(covering) == 1 else None,
        minimum=None if None in minima else min(minima),  # type: ignore[type-var]
        has_key=name in stages.exact,
    )


def certain_stages(leaves: Iterable[Leaf], num_stages: int) -> dict[str, int]:
    """Leaves whose stage is known before any step has run, by name.

    These are the elements of a list that have a key, lie between two keys, follow a key of the last stage, or come
    before the only key of stage 1.
    """
    leaves = list(leaves)
    certain: dict[str, int] = {}
    second = [leaf for leaf in leaves if leaf.stage == 1]
    lists: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        parent, _, last = leaf.name.rpartition(".")
        if last.isdigit():
            lists.setdefault(parent, []).append(leaf)
    for siblings in lists.values():
        keys = [leaf for leaf in siblings if leaf.stage is not None]
        opens_second = bool(keys) and keys[0].stage == 1 and all(leaf in siblings for leaf in second)
        for index, leaf in enumerate(siblings):
            is_followed = any(other.stage is not None for other in siblings[index + 1 :])
            if leaf.stage is not None:
                certain[leaf.name] = leaf.stage
            elif leaf.minimum is not None and (is_followed or leaf.minimum == num_stages - 1):
                certain[leaf.name] = leaf.minimum
            elif leaf.minimum is None and opens_second:
                certain[leaf.name] = 0
    return certain
