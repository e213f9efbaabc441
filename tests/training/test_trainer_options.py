"""Options and callbacks of the Trainer that reach into modules, or find something out by running steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ThroughputMonitor, Timer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.launching import launch
from tests.training.runs import pipeline_trainer, plain_trainer, weights

pytestmark = pytest.mark.multiprocess

MakeTrainer = Callable[..., L.Trainer]


class Normalised(L.LightningModule):
    """A batch norm before the cut, and micro-batches that are alike, so that each has the batch's mean and variance."""

    def __init__(self, *, synchronised: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr, self.batch_size = 0.1, 16
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        if synchronised:
            self.first = nn.SyncBatchNorm.convert_sync_batchnorm(self.first)
        self.second = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(self.first(x)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).repeat(16, 1)
        return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=self.batch_size)


def fit(make: MakeTrainer, folder: str, module: Normalised, **options: Any) -> dict[str, Tensor]:
    trainer = make(max_epochs=2, default_root_dir=folder, **options)
    trainer.fit(module)
    return weights(trainer)


class Validated(Normalised):
    """Notes when it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def on_validation_start(self) -> None:
        self.steps.append(self.trainer.global_step)


class ShiftedClock(L.Callback):
    """On the first rank validation is due by the clock after every other batch, and on the others after each."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, number: int) -> None:
        is_due = trainer.global_rank > 0 or number % 2 == 1
        trainer._last_val_time = -1e9 if is_due else 1e9  # type: ignore[attr-defined]


def by_the_clock(make: MakeTrainer) -> dict[str, Any]:
    module = Validated()
    throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    trainer = make(
        max_epochs=1,
        val_check_interval="00:00:00:01",
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[ShiftedClock(), Timer("00:01:00:00"), throughput],
        logger=DummyLogger(),
        log_every_n_steps=2,
    )
    trainer.fit(module, val_dataloaders=module.train_dataloader())
    rates = {name: float(value) for name, value in trainer.logged_metrics.items() if "per_sec" in name}
    return {"steps": module.steps, "rates": rates}


def profiled(make: MakeTrainer, folder: str) -> dict[str, Tensor]:
    # All rows: in the costliest 20, an operation of this small model stands by chance only.
    profiler = PyTorchProfiler(dirpath=folder, filename="profile", export_to_chrome=False, row_limit=-1)
    return fit(make, folder, Normalised(), profiler=profiler)


def synchronised(make: MakeTrainer, folder: str) -> dict[str, Tensor]:
    return fit(make, folder, Normalised(synchronised=True))


def asked_to_synchronise(make: MakeTrainer, folder: str) -> dict[str, Tensor]:
    return fit(make, folder, Normalised(), sync_batchnorm=True)


def found_learning_rate(make: MakeTrainer, folder: str) -> dict[str, Tensor]:
    module, trainer = Normalised(), make(max_epochs=2, default_root_dir=folder)
    Tuner(trainer).lr_find(module, num_training=10, early_stop_threshold=None)
    trainer.fit(module)
    return {**weights(trainer), "lr": torch.tensor(module.lr)}


SCENARIOS = {f.__name__: f for f in (profiled, synchronised, asked_to_synchronise, found_learning_rate)}
MORE = {"asked_to_synchronise"}


def on_stages(folder: str, names: list[str]) -> dict[str, Any]:
    def make(**options: Any) -> L.Trainer:
        return pipeline_trainer({"second": 1}, world=2, **options)

    results: dict[str, Any] = {name: SCENARIOS[name](make, folder) for name in names}
    results["profile"] = [path.read_text() for path in Path(folder).glob("*profile*.txt")]
    fit(make, folder, Normalised(), profiler=PyTorchProfiler(dirpath=folder, filename="trace"))
    results["traces"] = [json.loads(path.read_text())["traceEvents"] for path in Path(folder).glob("*trace-0*.json")]
    with pytest.raises(ValueError, match="tries batches until a device is full") as refused:
        Tuner(make(max_epochs=2, default_root_dir=folder)).scale_batch_size(Normalised())
    results["refused"] = str(refused.value)
    results["clock"] = by_the_clock(make)
    return results


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory, wanted: Any) -> list[dict[str, Any]]:
    return launch(on_stages, str(tmp_path_factory.mktemp("options")), wanted(SCENARIOS, MORE, "name"), world=2)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in SCENARIOS])
def test_it_comes_to_what_it_does_on_one_device(on_ranks: list[dict[str, Any]], name: str, tmp_path: Path) -> None:
    found, expected = on_ranks[0][name], SCENARIOS[name](plain_trainer, str(tmp_path))
    for key, tensor in expected.items():
        if "running_" in key or "num_batches" in key:  # once a micro-batch
            continue
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


def test_the_profile_is_written(on_ranks: list[dict[str, Any]]) -> None:
    assert any("aten::" in profile for profile in on_ranks[0]["profile"])


def test_kernels_lie_beneath_the_actions_of_the_schedule(on_ranks: list[dict[str, Any]]) -> None:
    [trace] = on_ranks[0]["traces"]
    spans = [event for event in trace if event.get("ph") == "X"]
    actions = {event["name"]: event for event in spans if event["name"].startswith("pipeline ")}
    for name, kernel in (("pipeline 0F2", "aten::addmm"), ("pipeline 0B2", "aten::mm")):
        action = actions[name]
        assert any(
            event["name"] == kernel
            and event["tid"] == action["tid"]
            and action["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= action["ts"] + action["dur"]
            for event in spans
        ), name


def test_ranks_validate_by_the_first_ones_clock(on_ranks: list[dict[str, Any]]) -> None:
    first, second = (results["clock"] for results in on_ranks)
    assert first["steps"] == second["steps"] == [2, 4]
    # The samples of a replica, and not twice as many for two stages, as in "train/samples_per_sec".
    trained = [name for name in first["rates"] if "samples" in name and "train" in name]
    assert trained == ["train/device/samples_per_sec"]


def test_scaling_the_batch_is_refused_on_all_ranks(on_ranks: list[dict[str, Any]]) -> None:
    assert all("choose batch_size" in results["refused"] for results in on_ranks)
