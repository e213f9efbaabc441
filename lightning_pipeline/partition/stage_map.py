"""The stage of each module that a stage_config names, and what is wrong with one that does not fit its module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_pipeline.partition.compiled import is_original, plain_name
from lightning_pipeline.partition.stage_config import Stage, stage_and_rank
from lightning_pipeline.schedules.validation import shown

# The bound on digits keeps the search linear in the length of a key, which may come from a file.
_SLICE = re.compile(r"(?P<container>.*?)\.?(?P<start>[0-9]{0,18}):(?P<stop>[0-9]{0,18})", re.DOTALL)


@dataclass(frozen=True)
class StageMap:
    """The stages of modules, by name.

    Attributes:
        num_stages: counts virtual stages, if a rank holds several.
        minimum: modules that come after one with a key in the same list, and may not run before its stage.
        ranks: the place in the pipeline of each stage for which keys name one.
    """

    num_stages: int
    exact: Mapping[str, int] = field(default_factory=dict)
    minimum: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)

    def covering(self, name: str) -> int | None:
        """The stage of the nearest key at or above module `name`; None if there is none."""
        return nearest(self.exact, name)

    def as_config(self) -> dict[str, Stage]:
        """The keys with their stages, and the ranks that are named, to be copied."""
        return {
            name: f"{stage}@{self.ranks[stage]}" if stage in self.ranks else stage for name, stage in self.exact.items()
        }

    def at_least(self, name: str) -> int | None:
        """The lowest stage on which module `name` may run, from a key before it in its list."""
        return nearest(self.minimum, name)


def resolve(
    module: nn.Module, config: Mapping[str, Stage], num_stages: int, *, has_virtual_stages: bool = False
) -> StageMap:
    """Check `config` against `module` and give each named module its stage.

    Virtual stages can be written in two ways, here for two of them on each of two ranks. Numbered along the data::

        {"layers.2": 1, "layers.4": 2, "layers.6": 3}

    or by the device group that holds them, as in MindSpore, where each change of the group begins a virtual stage::

        {"layers.2": 1, "layers.4": 0, "layers.6": 1}

    Values above ``num_stages - 1`` mean the first way. In the second way keys count in the order of the module's
    submodules, and not of the mapping.

    A value such as ``"1@0"`` also names the rank of its stage, counted within a pipeline.

    Args:
        num_stages: number of device groups, each of which holds one stage, or several virtual stages.
        has_virtual_stages: whether the schedule runs several stages on a device group.

    Raises:
        KeyError: a key names no module; the message lists the closest names.
        ValueError: a value is no stage, a stage has no key, or nothing is to be cut.
    """
    names = dict(module.named_modules())
    shared = {found[0] for found in places(module).values() if len(found) > 1}
    exact: dict[str, int] = {}
    on_ranks: dict[str, int] = {}
    for key, value in config.items():
        stage, rank = stage_and_rank(key, value)
        for name in _expand(key, names, shared):
            if rank is not None:
                on_ranks[name] = rank
            if name in exact and exact[name] != stage:
                several = "; where several stages call it, leave it out" if name in shared else ""
                raise ValueError(f"stage_config gives {name!r} two stages, {exact[name]} and {stage}{several}")
            exact[name] = stage
    if num_stages == 1:
        return StageMap(1)
    if has_virtual_stages and exact:
        if max(exact.values()) < num_stages:
            groups = exact
            exact = _along_the_data(groups, names, num_stages)
            if not on_ranks and max(exact.values()) >= num_stages:
                on_ranks = groups
        count = max(exact.values()) + 1
        missing = _first_missing(set(exact.values()), count)
        if missing:
            raise ValueError(
                f"no module of stage_config is on virtual stage {missing} of {count}, so it would never be reached; "
                f"name the first module of that virtual stage, or number them without a gap"
            )
        if count % num_stages:
            fewer = count - count % num_stages
            raise ValueError(
                f"stage_config makes {count} virtual stage{'s' * (count > 1)}, which num_stages={num_stages} device "
                f"groups cannot share evenly; cut the model into {f'{fewer} or ' * (fewer > 0)}{fewer + num_stages}"
            )
        return StageMap(count, exact, _later_siblings(exact, names), _ranks_of_stages(exact, on_ranks))
    _check_stages(module, exact, num_stages)
    return StageMap(num_stages, exact, _later_siblings(exact, names), _ranks_of_stages(exact, on_ranks))


def _ranks_of_stages(exact: Mapping[str, int], on_ranks: Mapping[str, int]) -> dict[int, int]:
    """The rank of each stage that has a module for which one is named."""
    named: dict[int, str] = {}
    for name, rank in on_ranks.items():
        first = named.setdefault(exact[name], name)
        if on_ranks[first] != rank:
            raise ValueError(
                f"stage_config puts stage {exact[name]} on two ranks, {on_ranks[first]} with {first!r} and {rank} with "
                f"{name!r}; a stage is on one rank, and has to be named once"
            )
    return {stage: on_ranks[name] for stage, name in named.items()}


def _along_the_data(groups: Mapping[str, int], names: Mapping[str, nn.Module], num_groups: int) -> dict[str, int]:
    """Turn device groups into virtual stages, which begin where the group changes."""
    stages: dict[str, int] = {}
    stage = group = 0
    opened_by = None
    for name in names:
        if name in groups:
            if groups[name] != group:
                following = (group + 1) % num_groups
                if groups[name] != following:
                    way_out = "give it to a module in between, or number the virtual stages along the data"
                    for cause in (name, opened_by):
                        if cause is not None and is_stateless(names[cause]):
                            way_out = runs_anywhere(cause, names[cause])
                            break
                    raise ValueError(
                        f"stage_config puts {name!r} on device group {groups[name]}, and the modules before it are on "
                        f"{group}; the data goes round the device groups, so {following} comes next: {way_out}"
                    )
                stage, group, opened_by = stage + 1, following, name
            stages[name] = stage
    return stages


def is_stateless(module: nn.Module) -> bool:
    """Whether a module has neither parameters nor buffers, so that no stage holds anything for it."""
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None


def runs_anywhere(name: str, module: nn.Module) -> str:
    """The part of an error that tells what to do about the key of a stateless module that several stages call."""
    return (
        f"{name!r} ({type(module).__name__}) has no parameters, and such a layer runs where its input is, on every "
        f"stage that calls it; its key in stage_config, or its pipeline_stage, can go"
    )


def places(root: nn.Module) -> dict[int, list[str]]:
    """All names of each module, by its id; the one that ``named_modules`` gives comes first.

    A module inside of one that has several names is listed under the first of these.
    """
    found: dict[int, list[str]] = {}
    for name, module in root.named_modules():
        found.setdefault(id(module), []).insert(0, name)
        for child_name, child in module._modules.items():
            place = f"{name}.{child_name}" if name else child_name
            if child is not None:
                found.setdefault(id(child), []).append(place)
    return {key: list(dict.fromkeys(names)) for key, names in found.items()}


def _expand(key: str, names: Mapping[str, nn.Module], shared: Container[str]) -> list[str]:
    name = _first_name(key, names)
    if name is not None:
        if name in shared and plain_name(name) != plain_name(key):
            raise ValueError(_other_name(key, name, names[name]))
        return [name]
    match = _SLICE.fullmatch(key)
    if match is None:
        raise KeyError(_unknown(key, names))
    container = match["container"]
    inner = {plain_name(name): name for name in names}  # the compiled module, as its wrapper has one child
    container = inner.get(plain_name(container)) or _first_name(container, names) or container
    if container not in names:
        raise KeyError(_unknown(container, names))
    children = [name for name, child in names[container]._modules.items() if child is not None]
    start = int(match["start"] or 0)
    stop = int(match["stop"] or len(children))
    if not 0 <= start < stop <= len(children):
        raise ValueError(f"stage_config key {shown(key)}: {container!r} has modules 0 to {len(children) - 1}")
    prefix = f"{container}." if container else ""
    found = [_first_name(prefix + child, names) for child in children[start:stop]]
    # A slice is about what stages hold. A module that holds nothing and is in several places runs where its input is.
    return [name for name in found if name is not None and not (name in shared and is_stateless(names[name]))]


def _first_name(key: str, names: Mapping[str, nn.Module]) -> str | None:
    """The name in `names` of the module that `key` names; None if there is no such module."""
    if not key:
        return None
    if key in names and not is_original(key):
        return key
    # The wrapper of a compiled module comes before the module, and takes its place here.
    outer = {plain_name(name): name for name in reversed(list(names))}
    if plain_name(key) in outer:
        return outer[plain_name(key)]
    try:
        module = names[""].get_submodule(key)  # another name of a module that is in several places
    except AttributeError:
        return None
    return next((name for name, other in names.items() if other is module), None)


def _other_name(key: str, name: str, module: nn.Module) -> str:
    if is_stateless(module):
        way_out = runs_anywhere(name, module)
    else:
        way_out = "where one stage calls it, use that name; where several do, it needs no key, and runs on each of them"
    return f"stage_config names {key!r}, which is {name!r} as well; {way_out}"


def _unknown(key: str, names: Mapping[str, nn.Module]) -> str:
    last = key.rpartition(".")[2]
    close = difflib.get_close_matches(key, [name for name in names if name], n=4, cutoff=0.4)
    close += [name for name in names if name.rpartition(".")[2] == last and name and name not in close][:4]
    hint = f"; the closest names are {', '.join(map(repr, close))}" if close else ""
    return f"stage_config names {shown(key)}, and the module has no submodule of that name{hint}"


def _check_stages(module: nn.Module, exact: Mapping[str, int], num_stages: int) -> None:
    used = set(exact.values())
    if not used:
        raise ValueError(
            f"there are {num_stages} stages and no stage_config says where {type(module).__name__} is cut; "
            f"name the first module of each later stage, for example stage_config={_suggestion(module, num_stages)}"
        )
    if max(used) >= num_stages:
        key = next(key for key, stage in exact.items() if stage == max(used))
        raise ValueError(
            f"stage_config puts {key!r} on stage {max(used)}, and num_stages={num_stages} counts stages 0 to "
            f"{num_stages - 1}; give num_stages={max(used) + 1}, lower the stage, or choose a schedule of virtual "
            f"stages such as interleaved_1f1b"
        )
    missing = _first_missing(used, num_stages)
    if missing:
        raise ValueError(
            f"no module of stage_config is on stage {missing} of num_stages={num_stages}, so it would never be "
            f"reached; name the first module of that stage, or give num_stages={len(used | {0})}"
        )


def _first_missing(used: Collection[int], count: int) -> int | None:
    """The first stage from 1 to `count` - 1 that is not used."""
    return next((stage for stage in range(1, count) if stage not in used), None)


def _suggestion(module: nn.Module, num_stages: int) -> dict[str, int]:
    """An example for an error: an even cut of the longest list of modules."""
    lists = [(name, sub) for name, sub in module.named_modules() if isinstance(sub, (nn.ModuleList, nn.Sequential))]
    name, longest = max(lists, key=lambda item: len(item[1]), default=("", nn.ModuleList()))
    count = len(longest)
    if count >= num_stages:
        prefix = f"{name}." if name else ""
        return {f"{prefix}{stage * count // num_stages}": stage for stage in range(1, num_stages)}
    children = [child for child, _ in module.named_children()]
    return {children[-1] if children else "name": num_stages - 1}


def _later_siblings(exact: Mapping[str, int], names: Mapping[str, nn.Module]) -> dict[str, int]:
    # Layers may be skipped at random, so each one after the first of a stage has to know that it cannot run earlier.
    minimum: dict[str, int] = {}
    for key, stage in exact.items():
        parent, _, last = key.rpartition(".")
        if not isinstance(names[parent], (nn.ModuleList, nn.Sequential)):
            continue
        siblings = [name for name, _ in names[parent].named_children()]
        for sibling in siblings[siblings.index(last) + 1 :]:
            name = f"{parent}.{sibling}" if parent else sibling
            minimum[name] = max(stage, minimum.get(name, 0))
    return minimum


def nearest(stages: Mapping[str, int], name: str) -> int | None:
    """The stage of the nearest key at or above module `name`; None if there is none."""
    while name:
        if name in stages:
            return stages[name]
        name = name.rpartition(".")[0]
    return None
