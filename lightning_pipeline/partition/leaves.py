"""Leaf modules: the parts of a model that run natively on one stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_pipeline.partition.compiled import is_compiled
from lightning_pipeline.partition.overrides import has_forward
from lightning_pipeline.partition.stage_config import StageMap, places


@dataclass(slots=True, eq=False)
class Leaf:
    """A topmost module whose subtree holds no boundary.

    Attributes:
        name: its qualified name (the first one, where it has several).
        module: the module.
        stage: the stage that a key gives it; None takes the stage where the data is.
        minimum: the lowest stage on which it may run, from a key before it in its list.
        has_key: the key is its own, and not one of a module around it.
    """

    name: str
    module: nn.Module
    stage: int | None
    minimum: int | None
    has_key: bool = False


def find_leaves(root: nn.Module, stages: StageMap) -> list[Leaf]:
    """The leaves of `root`, in the order of its tree. `root` itself is none, nor is a module that cannot be called."""
    inside = {name.rpartition(".")[0] for name in (*stages.exact, *stages.minimum)}
    ancestors = {""}
    for name in inside:
        while name:
            ancestors.add(name)
            name = name.rpartition(".")[0]
    found: list[Leaf] = []
    _descend(root, "", stages, ancestors, places(root), set(), found)
    return found


def certain_stages(leaves: Iterable[Leaf], num_stages: int) -> dict[str, int]:
    """Leaves whose stage is known before any step has run: elements of a list that have a key, lie between two keys,
    follow a key of the last stage, or come before the only key of stage 1.
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
            followed = any(other.stage is not None for other in siblings[index + 1 :])
            if leaf.stage is not None:
                certain[leaf.name] = leaf.stage
            elif leaf.minimum is not None and (followed or leaf.minimum == num_stages - 1):
                certain[leaf.name] = leaf.minimum
            elif leaf.minimum is None and opens_second:
                certain[leaf.name] = 0
    return certain


def _descend(
    module: nn.Module,
    prefix: str,
    stages: StageMap,
    ancestors: set[str],
    where: Mapping[int, list[str]],
    seen: set[int],
    found: list[Leaf],
) -> None:
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        if id(child) in seen:
            continue
        seen.add(id(child))
        if name in ancestors or not _callable(child):
            _descend(child, f"{name}.", stages, ancestors, where, seen, found)
        else:
            found.append(_leaf(name, child, stages, where[id(child)]))


def _leaf(name: str, module: nn.Module, stages: StageMap, names: Sequence[str]) -> Leaf:
    """A key of its own holds for all its calls; one around it only where all its places agree: the others' code calls
    it as well."""
    if name in stages.exact:
        stage: int | None = stages.exact[name]
    else:
        covering = {stages.covering(place) for place in names}
        stage = covering.pop() if len(covering) == 1 else None
    minima = [stages.at_least(place) for place in names]
    minimum = None if None in minima else min(minima)  # type: ignore[type-var]
    return Leaf(name, module, stage, minimum, has_key=name in stages.exact)


def _callable(module: nn.Module) -> bool:
    return has_forward(module) or is_compiled(module)
