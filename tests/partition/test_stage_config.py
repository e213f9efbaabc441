"""stage_config: what a key names, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_pipeline.partition.leaves import certain_stages, find_leaves
from lightning_pipeline.partition.stage_config import count_stages, read_stage_config
from lightning_pipeline.partition.stage_map import resolve
from tests.memory_limit import little_memory


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
        ({"layers.0:99999999999": 1}, 2, ValueError, "'layers.0:99999999999': 'layers' has modules 0 to 5"),
        ({"layers.0:" + "9" * 5000: 1}, 2, KeyError, r"'layers.0:9+\.\.\.9+'"),
        ({"layers." + "1" * 200_000: 1}, 2, KeyError, r"'layers.1+\.\.\.1+'"),
        ({"head": 10**12}, 2, ValueError, "is 1000000000000; a stage is a whole number from 0 to 262,143"),
        ({"head": 1 << 10**6}, 2, ValueError, "is a number of 1000001 bits"),
        ({"head": 200_000}, 300_000, ValueError, "stage 1 of num_stages=300000"),
        ({"head": "1"}, 2, ValueError, "is '1'; a stage is a whole number"),
        ({"head": -1}, 2, ValueError, "is -1"),
        ({"head": True}, 2, ValueError, "is True"),
        ({"head": 2}, 2, ValueError, "'head' on stage 2, and num_stages=2.*num_stages=3"),
        ({"head": 2}, 3, ValueError, "stage 1 of num_stages=3"),
        ({"head": "1@"}, 2, ValueError, "is '1@'; .* or with its rank such as \"1@0\""),
        ({"layers.4": "1@0", "head": "1@1"}, 2, ValueError, "1 on two ranks, 0 with 'layers.4' and 1 with 'head'"),
        ({"layers.0:3": 0, "layers.2": 1}, 2, ValueError, "'layers.2' two stages, 0 and 1"),
        ({}, 2, ValueError, "stage_config={'layers.3': 1}"),
    ],
)
def test_each_mistake_is_told(config: dict, num_stages: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve(Net(), config, num_stages)


def test_virtual_stages_are_not_counted_one_by_one() -> None:
    with pytest.raises(ValueError, match="virtual stage 1 of 200001, so it would never be reached"):
        resolve(Net(), {"head": 200_000}, 2, has_virtual_stages=True)


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 8)}]\n" for n in range(20)
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x89PNG\r\n\xff", "is not a plan: byte 0 is no text in UTF-8"),
        ("stage_config: {head: 1}".encode("utf-16"), "is not a plan: byte 0"),
        (b"head: 1\0", "is not a plan: it has a NUL byte at character 7"),
        (b"# " * 2**17 + b"\n", "is too large for a plan: it has more than 262,144 bytes"),
        (b"head: [", "is not a plan in YAML: ParserError"),
        (b"[" * 10_000, "is not a plan in YAML: RecursionError"),
        (BOMB.encode(), "is not a plan in YAML: .*an alias in line 2"),
        (b"head: !!int ''", "is not a plan in YAML: IndexError"),
        (b"head: 0000-00-00", "is not a plan in YAML: ValueError"),
        (b"head: !!timestamp now", "is not a plan in YAML: AttributeError"),
        (b"head: !!python/object/apply:os.system [true]", "is not a plan in YAML: ConstructorError"),
        (b"head: " + b"9" * 5000, "is not a plan in YAML: ValueError: Exceeds the limit"),
        (b"head: 0x" + b"f" * 5000, r"stage_config\['head'\] is a number of 20000 bits"),
        (b"? 0x" + b"f" * 5000 + b"\n: 1", "stage_config has the key a number of 20000 bits, which is no name"),
        (b"2020-01-01: 1", r"stage_config has the key datetime\.date\(2020, 1, 1\)"),
        (b"head: [1]", r"stage_config\['head'\] is \[1\]"),
        (b"head: 1000000000000", "a stage is a whole number from 0 to 262,143"),
        (b"- head", "has no stage_config"),
        (b"stage_config:", "has no stage_config"),
        (b"", "has no stage_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_of_any_content_gives_a_clear_error(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(content)
    with little_memory(), pytest.raises(ValueError, match=words) as error:
        read_stage_config(Net(), tmp_path / "plan.yaml")
    assert len(str(error.value)) < 700


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


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("layers.2:1", {"layers.2": 1}),
        ("{layers.2: 1, head=2}", {"layers.2": 1, "head": 2}),
        ("layers.0:12:0,layers.12:=1", {"layers.0:12": 0, "layers.12:": 1}),
        ("'a.b' : 3", {"a.b": 3}),
    ],
)
def test_keys_may_come_as_one_line(text: str, keys: dict[str, int]) -> None:
    assert read_stage_config(nn.Module(), text) == keys


@pytest.mark.parametrize("text", ["layers.2", "plan.yaml", "layers.2:one", "layers.2:1;head:2"])
def test_other_text_is_a_path(text: str) -> None:
    with pytest.raises(FileNotFoundError, match=r'keys such as "layers\.4:1"'):
        read_stage_config(nn.Module(), text)
