"""Files of weights are read whatever their kind, and told by name where they are damaged or name others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_pipeline.checkpoint import weights
from lightning_pipeline.checkpoint.torch_files import CheckpointError
from lightning_pipeline.checkpoint.weights import load_weights
from tests.memory_limit import little_memory

INDEX = "model.safetensors.index.json"
WANTED = ["weight", "bias"]


def layer() -> nn.Linear:
    return nn.Linear(3, 2)


@pytest.fixture
def saved() -> dict[str, torch.Tensor]:
    return layer().state_dict()


def write_index(folder: Path, content: Any) -> Path:
    path = folder / INDEX
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def refusal(path: Path) -> str:
    with little_memory(), pytest.raises(CheckpointError) as error:
        load_weights(layer(), path, WANTED)
    assert str(path) in str(error.value) and len(str(error.value)) < 800
    return str(error.value)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_files_of_any_version_of_torch_are_read(zipped: bool, saved: Any, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "w.bin", _use_new_zipfile_serialization=zipped)
    module = layer()
    assert load_weights(module, tmp_path / "w.bin", WANTED) == set(WANTED)
    assert torch.equal(module.weight, saved["weight"])


def test_files_of_an_index_may_lie_below_it_and_be_links(saved: Any, tmp_path: Path) -> None:
    """As in Hugging Face's cache, where all files are links to others."""
    for name in WANTED:
        save_file({name: saved[name]}, tmp_path / f"{name}.blob")
    (tmp_path / "snapshot" / "part").mkdir(parents=True)
    (tmp_path / "snapshot" / "part" / "1.safetensors").symlink_to(tmp_path / "weight.blob")
    (tmp_path / "snapshot" / "2.safetensors").symlink_to("../bias.blob")
    write_index(tmp_path / "snapshot", {"weight_map": {"weight": "part/1.safetensors", "bias": "2.safetensors"}})
    module = layer()
    assert load_weights(module, tmp_path / "snapshot", WANTED) == set(WANTED)
    assert torch.equal(module.bias, saved["bias"])


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "part/../../other.safetensors",
        "{folder}/other.safetensors",
        "..\\x",
        "C:\\x",
        "",
        "a\0b",
        "..",
        ".",
        "a" * 300,
        "a/" * 3000 + "x",
        "\ud800",
    ],
)
def test_an_index_names_files_of_its_folder_only(name: str, saved: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(saved, tmp_path / "other.safetensors")
    path = write_index(folder, {"weight_map": dict.fromkeys(WANTED, name.format(folder=tmp_path))})
    assert "which is not in its folder" in refusal(path)


@pytest.mark.parametrize("name", [INDEX, "other.index.json", "part"])
def test_an_index_names_no_index_and_no_folder(name: str, tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": dict.fromkeys(WANTED, name)})
    (tmp_path / "other.index.json").write_text(json.dumps({"weight_map": {"weight": INDEX}}))
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / INDEX).write_text(json.dumps({"weight_map": {"weight": "../part"}}))
    assert f"names '{name}', which is no file of weights" in refusal(tmp_path / INDEX)


def test_what_an_index_names_has_to_be_there(saved: Any, tmp_path: Path) -> None:
    path = write_index(tmp_path, {"weight_map": dict.fromkeys([*WANTED, "more"], "1.safetensors")})
    with pytest.raises(FileNotFoundError, match=r"1\.safetensors does not exist"):
        load_weights(layer(), path, WANTED)
    save_file(saved, tmp_path / "1.safetensors")
    assert "places more in '1.safetensors', which does not have it" in refusal(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "is no index in JSON: .*byte 0 is no text in UTF-8"),
        (b"{", "is no index in JSON: Expecting"),
        (b"\0", "is no index in JSON: .*NUL byte"),
        (b"[" * 100_000, "is no index in JSON: maximum recursion"),
        (b"9" * 5000, "is no index in JSON: Exceeds the limit"),
        (b"", "is no index in JSON"),
        ([], "has no weight_map"),
        ({}, "has no weight_map"),
        ({"weight_map": None}, "has no weight_map"),
        ({"weight_map": ["weight"]}, "has no weight_map"),
        ({"weight_map": {"weight": 3}}, "has no weight_map"),
        ({"weight_map": {"weight": "1.safetensors", "bias": None}}, "has no weight_map"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_index_is_told(content: Any, words: str, tmp_path: Path) -> None:
    assert re.search(words, refusal(write_index(tmp_path, content)))


def test_an_index_may_have_some_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_INDEX_BYTES", 100)
    path = write_index(tmp_path, {"weight_map": dict.fromkeys(map(str, range(20)), "1.safetensors")})
    assert "is too large for an index of weights: it has more than 100 bytes" in refusal(path)


class Unknown:
    """Something that weights are not."""


def test_objects_are_refused_with_the_way_out(saved: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": saved, "hook": Unknown()}, tmp_path / "w.pt")
    message = refusal(tmp_path / "w.pt")
    assert (
        "test_weights.Unknown), and these can run any code when they are loaded. If you trust it, load it yourself"
        in message
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1], "holds a list, and no state dict"),
        ({"state_dict": None}, "holds a NoneType"),
        (torch.ones(2), "holds a Tensor"),
    ],
)
def test_what_is_no_state_dict_is_told(content: Any, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pt")
    assert words in refusal(tmp_path / "w.pt")


def test_damaged_files_are_told(saved: Any, tmp_path: Path) -> None:
    save_file(saved, tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    for damaged in (b"", content[:5], content[:-1], b"\xff" * 8 + content[8:], content[:8] + b"[" + content[9:]):
        (tmp_path / "w.safetensors").write_bytes(damaged)
        assert "cannot be read as safetensors: SafetensorError" in refusal(tmp_path / "w.safetensors")
    torch.save(saved, tmp_path / "w.bin")
    whole = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").write_bytes(whole[:-10])
    assert "is cut off after" in refusal(tmp_path / "w.bin")
    (tmp_path / "w.bin").write_bytes(b"notes")
    assert "is no checkpoint: it starts with b'note'" in refusal(tmp_path / "w.bin")


def test_tensors_without_plain_values_are_told(saved: Any, tmp_path: Path) -> None:
    for value in (saved["weight"].to_sparse(), torch.empty(2, 3, device="meta")):
        torch.save({**saved, "weight": value}, tmp_path / "w.pt")
        assert "has no values to copy to weight: " in refusal(tmp_path / "w.pt")


def test_a_submodule_that_is_not_there_is_told(saved: Any, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="weights has the key 'modl', which is no submodule of Linear"):
        load_weights(layer(), {"modl": tmp_path / "w.pt"}, WANTED)
