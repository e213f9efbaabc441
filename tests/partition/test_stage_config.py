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
