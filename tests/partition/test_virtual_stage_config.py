"""stage_config with virtual stages: along the data, or by the device group that holds them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_pipeline.partition.stage_map import resolve
from lightning_pipeline.schedules import build


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))
        self.head = nn.Linear(2, 2)


def virtual(config: dict[str, Any], num_stages: int) -> Any:
    return resolve(Net(), config, num_stages, has_virtual_stages=True)


@pytest.mark.parametrize(
    ("by_group", "num_stages"),
    [
        ({"layers.1": 1, "layers.3": 0, "layers.5": 1}, 2),
        ({"layers.0:1": 0, "layers.1:3": 1, "layers.3:5": 0, "layers.5": 1, "head": 1}, 2),
        ({"layers.5": 1, "layers.3": 0, "layers.1": 1}, 2),  # keys are taken in the module's order
        ({"layers.0": 1, "layers.1": 2, "layers.2": 0, "layers.3": 1, "layers.4": 2}, 3),
    ],
)
def test_by_group_means_the_same_as_along_the_data(by_group: dict[str, int], num_stages: int) -> None:
    stages = virtual(by_group, num_stages)
    count = 2 * num_stages
    assert stages.num_stages == count
    assert stages.ranks == {stage: stage % num_stages for stage in set(stages.exact.values())}
    assert sorted(set(stages.exact.values()) | {0}) == list(range(count))
    assert all(
        stages.exact[name] % num_stages == by_group.get(name, stages.exact[name] % num_stages) for name in stages.exact
    )
    along = virtual(dict(stages.exact), num_stages)
    assert along.exact == stages.exact and not along.ranks


def test_groups_have_to_be_the_schedules() -> None:
    by_group = virtual({"layers.1": 1, "layers.3": 0, "layers.5": 1}, 2)
    build("interleaved_1f1b", 2, 4, 2).on_ranks(by_group.ranks)
    with pytest.raises(ValueError, match=r"\(1@1, 2@0, 3@1\), and 'zbv' needs .* each of 0\+3, 1\+2.*along the data"):
        build("zbv", 2, 4, 2).on_ranks(by_group.ranks)


def test_virtual_stages_on_named_ranks() -> None:
    in_a_v = virtual({"layers.1": "1@1", "layers.3": "2@1", "layers.5": "3@0"}, 2)
    assert in_a_v.ranks == {1: 1, 2: 1, 3: 0}
    assert build("zbv", 2, 4, 2).on_ranks(in_a_v.ranks) == build("zbv", 2, 4, 2)
    with pytest.raises(ValueError, match=r"each of 0\+2, 1\+3"):
        build("interleaved_1f1b", 2, 4, 2).on_ranks(in_a_v.ranks)


def test_a_shared_activation_is_told_where_it_upsets_the_order() -> None:
    act = nn.ReLU()
    net = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), nn.Linear(2, 2), act)
    for stages in ((0, 2, 0, 1), (0, 1, 0, 2)):
        config = {str(index): stage for index, stage in enumerate(stages)}
        with pytest.raises(ValueError, match=r"comes next: '1' \(ReLU\) has no parameters, and .* its key .* can go"):
            resolve(net, config, 3, has_virtual_stages=True)


@pytest.mark.parametrize(
    ("config", "num_stages", "words"),
    [
        (
            {"layers.1": 2, "layers.2": 1, "layers.3": 0},
            3,
            "'layers.1' on device group 2.*before it are on 0.*1 comes next",
        ),
        (
            {"layers.1": 1, "layers.2": 0, "layers.3": 2},
            3,
            "'layers.2' on device group 0.*before it are on 1.*2 comes next",
        ),
        ({"layers.1": 1, "layers.2": 0}, 2, "makes 3 virtual stages, which num_stages=2 .*; cut the model into 2 or 4"),
        ({"layers.1": 1, "layers.2": 2}, 2, "makes 3 virtual stages, which num_stages=2 .*; cut the model into 2 or 4"),
        ({"layers.1": 0}, 2, "makes 1 virtual stage, which num_stages=2 .*; cut the model into 2$"),
        (
            {"layers.1": 1, "layers.2": 3},
            2,
            "on virtual stage 2 of 4, so it would never be reached; name the first module",
        ),
        ({}, 2, "no stage_config says where Net is cut"),
    ],
)
def test_each_mistake_is_told(config: dict[str, int], num_stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        virtual(config, num_stages)
