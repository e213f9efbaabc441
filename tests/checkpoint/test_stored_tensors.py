"""Tensors of checkpoint folders: what hooks may do with them, and what is read when."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipeline.checkpoint.check import check_optimizers
from lightning_pipeline.checkpoint.files import CheckpointError
from lightning_pipeline.checkpoint.folder import convert_checkpoint, read_folder
from lightning_pipeline.checkpoint.optimizer_layout import OptimizerLayout
from lightning_pipeline.checkpoint.shards import ShardFiles
from lightning_pipeline.checkpoint.state import load_module_state
from lightning_pipeline.checkpoint.stored_tensors import StoredTensor


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))


@pytest.fixture
def saved() -> nn.Sequential:
    return model()


@pytest.fixture
def folder(saved: nn.Sequential, tmp_path: Path) -> Path:
    optimizer = torch.optim.Adam(saved.parameters())
    saved(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"state_dict": saved.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "file.ckpt")
    convert_checkpoint(tmp_path / "file.ckpt", tmp_path / "folder.ckpt")
    return tmp_path / "folder.ckpt"


def test_hooks_may_rename_and_compute(saved: nn.Sequential, folder: Path) -> None:
    state = read_folder(folder)["state_dict"]
    assert state["0.weight"].shape == (4, 3) and state["0.weight"].dtype == torch.float32
    state["1.bias"] = state.pop("1.bias") * 2
    state["0.bias"], state["1.weight"] = state["0.bias"], state["1.weight"].T
    loaded = model()
    load_module_state(loaded, state)
    assert torch.equal(loaded[0].weight, saved[0].weight)
    assert torch.equal(loaded[1].bias, 2 * saved[1].bias)
    assert torch.equal(loaded[1].weight, saved[1].weight.T)


def test_only_what_is_held_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = ShardFiles.read
    monkeypatch.setattr(ShardFiles, "read", lambda self, name, into: (read.append(name), original(self, name, into))[1])
    held = model()
    held[0].to("meta")
    load_module_state(held, read_folder(folder)["state_dict"])
    assert read == ["state_dict.1.weight", "state_dict.1.bias"]


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
        (OSError(errno.EIO, "Input/output error"), OSError, r"Input/output error: '.*folder\.ckpt'"),
        (
            OSError(errno.EINVAL, "Invalid argument"),
            CheckpointError,
            r"cannot give state_dict\.0\.bias, from __0_0\.distcp",
        ),
    ],
    ids=["interrupt", "system", "file"],
)
def test_what_ends_a_read_is_told_as_it_is(
    failure: BaseException, kind: type[BaseException], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch wraps all of it in an error of its own, which is no Exception."""
    stored = read_folder(folder)["state_dict"]["0.bias"]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise failure

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(kind, match=words):
        stored.read()


def test_state_of_parameters_in_another_order_is_refused(saved: nn.Sequential, folder: Path) -> None:
    checkpoint = read_folder(folder)
    layout = OptimizerLayout(torch.optim.Adam(saved.parameters()), saved)
    [state] = checkpoint["optimizer_states"]
    assert isinstance(state["state"][0]["exp_avg"], StoredTensor)
    layout.load_state(state)
    assert type(layout.optimizer.state[saved[0].weight]["exp_avg"]) is torch.Tensor
    for values in state["state"].values():
        for key, stored in values.items():
            stored.name_in_files = f"optimizer_0.state.1.bias.{key}"
    checkpoint["lr_schedulers"] = []
    with pytest.raises(CheckpointError, match=r"is in another order \(that of 1\.bias where 0\.weight is"):
        check_optimizers(checkpoint, saved, [layout], path=None)
