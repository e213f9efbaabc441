"""stage_config: what a key names, and what each mistake is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipeline.partition.leaves import certain_stages, find_leaves
from lightning_pipeline.partition.stage_config import count_stages, read_stage_config, resolve


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))
        self.head = nn.Linear(4, 4)


def test_a_key_covers_its_subtree_and_later_siblings_carry_it_as_a_minimum() -> None:
    stages = resolve(Net(), {"layers.2": 1, "layers.4": 2}, 3)
    assert stages.covering("layers.2.0") == 1
    assert stages.covering("layers.3") is None
    assert [stages.at_least(f"layers.{i}") for i in range(6)] == [None, None, None, 1, 1, 2]


def test_a_slice_names_the_modules_of_a_container() -> None:
    stages = resolve(Net(), {"layers.0:2": 0, "layers.2:": 1}, 2)
    assert dict(stages.exact) == {"layers.0": 0, "layers.1": 0, **{f"layers.{i}": 1 for i in range(2, 6)}}


def test_attributes_mean_the_same_as_keys() -> None:
    net = Net()
    net.layers[3].pipeline_stage = 1
    assert read_stage_config(net) == {"layers.3": 1}
    net.stage_config = {"head": 1}
    assert read_stage_config(net) == {"head": 1}
    assert read_stage_config(net, {"embed": 0}) == {"embed": 0}


def test_stages_are_counted() -> None:
    assert count_stages({"a": 2, "b": 0}) == 3
    assert count_stages({}) is None


@pytest.mark.parametrize(
    ("config", "num_stages", "error", "words"),
    [
        ({"layrs.2": 1}, 2, KeyError, "'layrs.2'.*closest names are .*'layers.2'"),
        ({"model.head": 1}, 2, KeyError, "closest names are .*'head'"),
        ({"layers.9": 1}, 2, KeyError, "'layers.9'"),
        ({"layers.4:9": 1}, 2, ValueError, "'layers' has modules 0 to 5"),
        ({"head": "1"}, 2, ValueError, "is '1'; a stage is a whole number"),
        ({"head": -1}, 2, ValueError, "is -1"),
        ({"head": True}, 2, ValueError, "is True"),
        ({"head": 2}, 2, ValueError, "'head' on stage 2, and num_stages=2.*num_stages=3"),
        ({"head": 2}, 3, ValueError, "stage 1 of num_stages=3"),
        ({"layers.0:3": 0, "layers.2": 1}, 2, ValueError, "'layers.2' two stages, 0 and 1"),
        ({}, 2, ValueError, "stage_config={'layers.3': 1}"),
    ],
)
def test_each_mistake_is_told(config: dict, num_stages: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve(Net(), config, num_stages)


def test_one_stage_takes_any_config() -> None:
    assert resolve(Net(), {"layers.2": 1}, 1).exact == {}


def test_leaves_are_topmost_modules_without_a_boundary() -> None:
    root = nn.Module()
    root.net = Net()
    leaves = find_leaves(root, resolve(root, {"net.layers.2.1": 1}, 2))
    assert [leaf.name for leaf in leaves] == [
        *("net.embed", "net.layers.0", "net.layers.1", "net.layers.2.0", "net.layers.2.1"),
        *("net.layers.3", "net.layers.4", "net.layers.5", "net.head"),
    ]


class Shares(nn.Module):
    """Two blocks with an activation and a layer in common."""

    def __init__(self) -> None:
        super().__init__()
        act, common = nn.ReLU(), nn.Linear(4, 4)
        self.one, self.two = (nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), common) for _ in range(2))
        self.acts = nn.Sequential(act, act, nn.Linear(4, 4))


def test_a_module_in_several_places_is_told_by_its_other_names() -> None:
    runs = r"'one.1' \(ReLU\) has no parameters, and .* runs where its input is, .*; its key in stage_config, .* can go"
    for key in ("two.1", "acts.0", "acts.1"):
        for config in ({key: 1}, {"one.1": 0, key: 1}):
            with pytest.raises(ValueError, match=rf"names '{key}', which is 'one.1' as well; {runs}"):
                resolve(Shares(), config, 2)
    words = r"names 'two.3', which is 'one.3' as well; where one stage calls it, use that name; where several do, it"
    with pytest.raises(ValueError, match=words):
        resolve(Shares(), {"two.3": 1}, 2)
    assert resolve(Shares(), {"one.1": 1}, 2).exact == {"one.1": 1}


def test_a_slice_leaves_out_activations_that_others_share() -> None:
    stages = resolve(Shares(), {"one.0:3": 0, "two.0:3": 1, "acts.2:3": 1}, 2)
    assert stages.exact == {"one.0": 0, "one.2": 0, "two.0": 1, "two.2": 1, "acts.2": 1}
    words = r"gives 'one\.3' two stages, 0 and 1; where several stages call it, leave it out"
    with pytest.raises(ValueError, match=words):
        resolve(Shares(), {"one.:": 0, "two.:": 1}, 2)


def test_a_name_may_go_by_another_name_of_what_it_is_in() -> None:
    root = nn.Module()
    root.model = Net()
    root.layers = root.model.layers
    for config in ({"layers.2": 1, "model.layers.4": 1}, {"model.layers.2": 1, "layers.4": 1}):
        stages = resolve(root, config, 2)
        assert stages.exact == {"model.layers.2": 1, "model.layers.4": 1}
        certain = certain_stages(find_leaves(root, stages), 2)
        assert certain == {f"model.layers.{i}": int(i >= 2) for i in range(6)}
    assert list(resolve(root, {"layers.4:": 1}, 2).exact) == ["model.layers.4", "model.layers.5"]
    found = find_leaves(root, resolve(root, {"model.layers": 1, "layers.2.0": 1}, 2))
    assert {leaf.name: leaf.stage for leaf in found}["model.layers.2.1"] == 1


def test_a_key_around_one_of_several_places_says_nothing_of_the_others() -> None:
    def stage_of_leaves(config: dict[str, int]) -> dict[str, int | None]:
        root = Shares()
        return {leaf.name: leaf.stage for leaf in find_leaves(root, resolve(root, config, 2))}

    found = stage_of_leaves({"one": 0, "one.0": 0, "two.0": 1})
    assert (found["one.1"], found["one.2"], found["one.3"]) == (None, 0, None)
    agreed = stage_of_leaves({"one": 1, "one.0": 1, "two": 1, "acts": 1})
    assert (agreed["one.1"], agreed["one.3"]) == (1, 1)
    root = Shares()
    leaves = {leaf.name: leaf for leaf in find_leaves(root, resolve(root, {"one.0": 1, "two.0": 1}, 2))}
    assert (leaves["one.2"].minimum, leaves["one.3"].minimum) == (1, 1)
    assert leaves["one.1"].minimum is None  # acts is on no stage in particular
    assert [leaf.name for leaf in leaves.values() if leaf.has_key] == ["one.0", "two.0"]


def test_what_lies_between_two_keys_of_a_list_is_certain() -> None:
    root = Net()
    stages = resolve(root, {"layers.1": 1, "layers.3": 2, "head": 2}, 3)
    certain = certain_stages(find_leaves(root, stages), 3)
    named = {"layers.1": 1, "layers.2": 1, "layers.3": 2, "layers.4": 2, "layers.5": 2}
    assert certain == {"layers.0": 0, **named}  # what comes before the only key of stage 1 is certain, too


def test_what_comes_before_one_of_several_keys_of_stage_1_is_open() -> None:
    root = Net()
    stages = resolve(root, {"embed": 1, "layers.1": 1}, 2)
    assert "layers.0" not in certain_stages(find_leaves(root, stages), 2)


def test_keys_need_not_name_the_compilers_wrappers() -> None:
    module = nn.Module()
    module.net = torch.compile(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    module.head = torch.compile(nn.Linear(2, 2))
    for key, names in {
        "net.1": ["net._orig_mod.1"],
        "net._orig_mod.1": ["net._orig_mod.1"],
        "net.1:3": ["net._orig_mod.1", "net._orig_mod.2"],
        "head": ["head"],
        "head._orig_mod": ["head"],
    }.items():
        assert list(resolve(module, {key: 1}, 2).exact) == names
    leaves = find_leaves(module, resolve(module, {"head": 1}, 2))
    assert [leaf.name for leaf in leaves] == ["net", "head"]
