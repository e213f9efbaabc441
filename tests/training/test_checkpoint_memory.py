"""What saving and loading need beside what a rank holds: no rank but the first ever has another stage's tensors."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.launching import launch
from tests.training.runs import pipeline_trainer

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads and resets the kernel's count of a process's memory"),
]

M_MMAP_THRESHOLD = -3  # of malloc.h
WIDTH = 2048
LAYERS = 2  # of a stage
TENSOR = WIDTH * WIDTH * 4 / 2**20  # MiB
WEIGHTS, STATE = LAYERS * TENSOR, 2 * LAYERS * TENSOR  # of a stage; AdamW keeps two tensors for each
SLACK = 8  # MiB: small objects, buffers of connections, code that runs for the first time


class LitLarge(L.LightningModule):
    """Layers of one large tensor each; as many on each of two stages."""

    stage_config = {f"layers.{LAYERS}": 1}

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 * LAYERS))
        self.layers.to_empty(device="cpu")
        for layer in self.layers:
            nn.init.constant_(layer.weight, 1 / WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Memory:
    """This process's memory in MiB, from now on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in use now
        self._start = _status()

    def grown(self) -> dict[str, float]:
        """By how much the peak, the memory of its own, and the mapped pages of files have grown."""
        now = _status()
        return {
            "peak": now["VmHWM"] - self._start["VmRSS"],
            "own": now["RssAnon"] - self._start["RssAnon"],
            "of files": now["RssFile"] - self._start["RssFile"],
        }


def _status() -> dict[str, float]:
    text = Path("/proc/self/status").read_text()
    return {name: int(size) / 1024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}


class Saving(Callback):
    """Saves at the end of training, while each rank has its own part of the states, and notes what that needs."""

    found: dict[str, float]

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        memory = Memory()
        trainer.save_checkpoint(self._path)
        self.found = memory.grown()


class Loading(Callback):
    """Notes what loading a checkpoint needs, when the file is opened and when all is loaded."""

    found: dict[str, dict[str, float]]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.found = {}
        load = trainer.strategy.load_checkpoint

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.memory = Memory()
            content = load(*args, **kwargs)
            self.found["opened"] = self.memory.grown()
            return content

        trainer.strategy.load_checkpoint = noted

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found["loaded"] = self.memory.grown()


def save_and_load(folder: str) -> dict[str, dict[str, float]]:
    """What saving a file, opening it and loading this rank's part of it need."""
    # Blocks of this size go back to the system when they are freed. The strategy leaves the allocator alone then.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 * 1024)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    path = f"{folder}/large.ckpt"
    data = DataLoader(TensorDataset(torch.ones(4, WIDTH)), batch_size=4)

    saving = Saving(path)
    trainer = pipeline_trainer(LitLarge.stage_config, world=2, max_steps=1, callbacks=[saving])
    trainer.fit(LitLarge(), data)
    del trainer

    loading = Loading()
    trainer = pipeline_trainer(LitLarge.stage_config, world=2, max_steps=2, callbacks=[loading])
    trainer.fit(LitLarge(), data, ckpt_path=path)
    return {"saved": saving.found, **loading.found}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    return launch(save_and_load, str(tmp_path_factory.mktemp("checkpoints")), world=2)


def test_saving_takes_one_tensor_and_on_the_first_rank_what_the_file_holds(ranks: Any) -> None:
    first, second = (rank["saved"]["peak"] for rank in ranks)
    assert second < TENSOR + SLACK
    assert WEIGHTS + STATE - SLACK < first < WEIGHTS + STATE + TENSOR + SLACK  # those of the other stage


def test_loading_reads_what_the_rank_holds(ranks: Any) -> None:
    for rank in ranks:
        assert rank["opened"]["peak"] < SLACK
        # There was no state, and there were the weights of both stages.
        assert STATE - WEIGHTS - SLACK < rank["loaded"]["own"] < STATE - WEIGHTS + SLACK
        assert rank["loaded"]["of files"] < WEIGHTS + STATE + SLACK
        assert rank["loaded"]["peak"] < WEIGHTS + 2 * STATE + TENSOR + SLACK  # pages that were read are there as well
