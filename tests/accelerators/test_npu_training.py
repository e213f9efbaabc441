"""Training through a Trainer on simulated NPUs: what is simulated, and what is not, `simulated_npu` says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.strategy.patches import agree_on_overflow
from tests.accelerators.simulated_npu import SimulatedHCCL, install
from tests.launching import launch
from tests.training.runs import QUIET, Losses, differing, weights

# The simulation's groups are Python objects, which the flight recorder of 2.15 does not take.
pytestmark = pytest.mark.skipif(torch.__version__ >= (2, 15), reason="torch_npu is for torch 2.13")
NUM_BATCHES = 2


class LitMLP(L.LightningModule):
    """Two blocks, the second one the second stage's; dropout in both, and a hook that draws on the device."""

    stage_config = {"second": 1}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        assert hidden.is_npu == (self.device.type == "npu") and hidden.device.type == self.device.type
        return self.second(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, *_: Any) -> None:
        self.drawn.append(float(torch.rand((), device=self.device)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=64 // NUM_BATCHES)


def fit(accelerator: str, folder: Path, *, epochs: int = 2, ckpt_path: str | None = None, **options: Any) -> Any:
    """A trained module, its trainer and its losses."""
    L.seed_everything(3)
    losses = Losses()
    callbacks = [losses, *options.pop("callbacks", [])]
    settings = {**QUIET, "accelerator": accelerator, "default_root_dir": folder, "callbacks": callbacks, **options}
    trainer = L.Trainer(max_epochs=epochs, **settings)
    module = LitMLP()
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return module, trainer, losses.values


def visible_to_torchrun(rank: int) -> None:
    """As a launch does that gives each process one NPU: torch computes gradients on the simulated `npu:0` only."""
    os.environ.update(
        RANK=str(rank),
        GROUP_RANK="0",
        LOCAL_WORLD_SIZE="2",
        TORCHELASTIC_RUN_ID="1",
        ASCEND_RT_VISIBLE_DEVICES=str(rank),
    )


class Devices(Callback):
    """Notes where a training batch's work was done."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        held = {p.device.type for p in pl_module.parameters() if not p.is_meta}
        states = trainer.optimizers[0].state.values()
        self.types = held | {state["exp_avg"].device.type for state in states} | {trainer.strategy.root_device.type}


def overflow_of_one_rank(rank: int) -> bool:
    """What a scaler like torch_npu's, which notes overflows, has noted; the second rank's gradient is infinite."""
    scaler: Any = torch.amp.GradScaler("npu")
    scaler._has_overflow = False
    agree_on_overflow(scaler, torch.device("npu", 0), setattr)
    weight = nn.Parameter(torch.ones(2, device="npu"))
    weight.grad = torch.full((2,), float("inf") if rank else 1.0, device="npu")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler._unscale_grads_(optimizer, torch.ones((), device="npu"), torch.zeros((), device="npu"), False)
    return scaler._has_overflow


def two_stages(folder: Path) -> dict[str, Any]:
    """A rank's run on two NPUs, and what it saw."""
    rank = int(os.environ["LOCAL_RANK"])
    visible_to_torchrun(rank)
    npu = install()
    pipeline: dict[str, Any] = {"devices": 2, "strategy": "pipeline"}
    devices = Devices()
    checkpoint = ModelCheckpoint(folder, filename="after{epoch}", auto_insert_metric_name=False, save_top_k=-1)
    module, trainer, losses = fit(
        "npu",
        folder,
        **pipeline,
        logger=CSVLogger(folder, name="", version=f"rank{rank}"),
        log_every_n_steps=1,
        enable_checkpointing=True,
        callbacks=[devices, checkpoint, DeviceStatsMonitor()],
    )
    groups = torch.distributed.distributed_c10d._world.pg_map
    used = {name for group in groups if isinstance(group, SimulatedHCCL) for name in group.used}
    found = {
        "root_device": str(trainer.strategy.root_device),
        "backend": trainer.strategy.process_group_backend,
        "types": sorted(devices.types),
        "used": sorted(used),
        "calls": sorted(set(npu.calls)),
        "losses": losses,
        "weights": {name: tensor.cpu() for name, tensor in weights(trainer).items()},
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "predictions": torch.cat(trainer.predict(module, loader())).cpu(),
    }
    found["overflow"] = overflow_of_one_rank(rank)
    resumed, _, rest = fit("npu", folder, **pipeline, ckpt_path=str(folder / "after0.ckpt"))
    return {**found, "resumed": rest, "drawn": (module.drawn, resumed.drawn)}


def one_device(folder: Path) -> dict[str, Any]:
    """The same without NPUs, and what a Trainer makes of one NPU."""
    install()
    _, trainer, losses = fit("cpu", folder, devices=1, strategy=PipelineStrategy(num_stages=1, num_microbatches=8))
    return {
        "losses": losses,
        "weights": weights(trainer),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "predictions": torch.cat(trainer.predict(trainer.lightning_module, loader())),
    }


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return launch(two_stages, folder, world=2)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return launch(one_device, folder, world=1)[0]


def test_tensors_are_on_the_npu_and_travel_over_hccl(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (rank["root_device"], rank["types"]) == ("npu:0", ["npu"])  # the one that each process sees
        assert rank["backend"] == "cpu:gloo,npu:hccl"
        assert {"send", "recv"} <= set(rank["used"])
        assert {"set_device", "empty_cache"} <= set(rank["calls"])


def test_two_stages_on_npus_give_the_bits_of_one_process_on_the_cpu(
    ranks: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert len(alone["losses"]) == 2 * NUM_BATCHES
    assert differing(ranks[0]["weights"], alone["weights"]) == {}
    for rank in ranks:
        assert rank["losses"] == alone["losses"]
        assert rank["val_loss"] == alone["val_loss"]
        assert torch.equal(rank["predictions"], alone["predictions"])


def test_a_run_resumes_where_it_stopped_the_device_s_random_state_included(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        drawn, drawn_after = rank["drawn"]
        assert rank["resumed"] == rank["losses"][NUM_BATCHES:]
        assert drawn_after == drawn[NUM_BATCHES:]
        assert len(set(drawn)) == len(drawn)


def test_checkpoints_load_where_there_is_no_npu(ranks: list[dict[str, Any]], folder: Path) -> None:
    checkpoint = torch.load(folder / "after1.ckpt", weights_only=True)
    assert {tensor.device.type for tensor in checkpoint["state_dict"].values()} == {"cpu"}
    module = LitMLP.load_from_checkpoint(folder / "after1.ckpt")
    assert differing(dict(module.state_dict()), ranks[0]["weights"]) == {}


def test_an_overflow_of_one_rank_is_noted_on_all(ranks: list[dict[str, Any]]) -> None:
    assert [rank["overflow"] for rank in ranks] == [True, True]


def test_device_stats_are_logged(ranks: list[dict[str, Any]], folder: Path) -> None:
    header = (folder / "rank0" / "metrics.csv").read_text().partition("\n")[0]
    assert "DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.peak" in header.split(",")
