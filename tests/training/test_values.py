"""Logged values, and what callbacks decide by them, are the same on every rank and those of one process."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launching import launch
from tests.training.measured import LitMeasured, measured_stages, point_loader
from tests.training.runs import Losses, pipeline_trainer, plain_trainer

pytestmark = pytest.mark.multiprocess

MAX_EPOCHS = 12


class Watch(Losses):
    """Notes on every rank what the progress bar shows, the learning rates, and the metrics of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []
        self.rates: list[float] = []
        self.epochs: list[dict[str, float]] = []
        self.logits: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        bar = trainer.progress_bar_callback
        self.shown.append({} if bar is None else bar.get_metrics(trainer, pl_module))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.logits.append(tuple(outputs["logits"].shape))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(metrics(trainer))


def metrics(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit_with_everything(trainer_of: Any, folder: Path, bar: Any, max_epochs: int = MAX_EPOCHS) -> dict[str, Any]:
    """Fit with monitors, schedulers, loggers and a progress bar."""
    watch = Watch()
    stopping = EarlyStopping("val_loss", patience=2, min_delta=0.02)
    best = ModelCheckpoint(folder, "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True)
    L.seed_everything(3, verbose=False)
    trainer = trainer_of(
        callbacks=[watch, stopping, best, LearningRateMonitor("step"), bar],
        enable_checkpointing=True,
        enable_progress_bar=True,
        logger=[CSVLogger(folder, "csv"), TensorBoardLogger(folder, "tensorboard")],
        log_every_n_steps=2,
        max_epochs=max_epochs,
        default_root_dir=folder,
    )
    trainer.fit(LitMeasured(scheduler="plateau"), point_loader(29, shuffle=True), point_loader(21, seed=1))
    return {
        "metrics": metrics(trainer),
        "epochs": watch.epochs,
        "logged": sorted(trainer.logged_metrics),
        "losses": watch.values,
        "shown": watch.shown,
        "rates": watch.rates,
        "logits": watch.logits,
        "stopped_epoch": stopping.stopped_epoch,
        "best": (str(best.best_model_path), float(best.best_model_score), sorted(map(str, best.best_k_models))),
    }


class LitTimed(LitMeasured):
    """Logs what a clock shows, in which no two processes agree."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_clock", time.perf_counter(), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"val_clock": time.perf_counter(), "val_constant": 2.5})
        return super().validation_step(batch, batch_idx)


def clocks(trainer: L.Trainer) -> dict[str, float]:
    trainer.fit(LitTimed(), point_loader(29), point_loader(21, seed=1))
    return {name: value for name, value in metrics(trainer).items() if "clock" in name or "constant" in name}


def measure(world: int, folder: Path, bars: list[str]) -> dict[str, Any]:
    def pipeline(**options: Any) -> L.Trainer:
        return pipeline_trainer(measured_stages(world), world=world, **options)

    results = {"tqdm": fit_with_everything(pipeline, folder / str(world), TQDMProgressBar())}
    if world > 1:
        results["clocks"] = clocks(pipeline(max_epochs=1))
    if world > 1 and "rich" in bars:
        results["rich"] = fit_with_everything(pipeline, folder / "rich", RichProgressBar(), max_epochs=2)
    if world == 1:
        results["plain"] = fit_with_everything(plain_trainer, folder / "plain", TQDMProgressBar())
    return results


@pytest.fixture(scope="module")
def one_process(folder: Path) -> dict[str, Any]:
    return launch(measure, 1, folder, [], world=1)[0]


@pytest.fixture(scope="module")
def ranks(folder: Path, wanted: Any) -> list[dict[str, Any]]:
    return launch(measure, 2, folder, wanted(["tqdm", "rich"], ["rich"], "bar"), world=2)


def test_metrics_are_those_of_one_process_on_every_rank(one_process: Any, ranks: Any) -> None:
    expected = one_process["tqdm"]
    for rank in ranks:
        assert rank["tqdm"]["epochs"] == expected["epochs"]
        assert rank["tqdm"]["metrics"] == expected["metrics"]
        for key in ("losses", "logged", "rates", "logits", "stopped_epoch"):
            assert rank["tqdm"][key] == expected[key], key


def test_metrics_are_those_of_plain_lightning(one_process: Any) -> None:
    found, expected = one_process["tqdm"], one_process["plain"]
    assert found["metrics"].keys() == expected["metrics"].keys()
    # The standard deviation over a micro-batch is another number than that over a batch.
    of_microbatches = {"logits/std"}
    for ours, plain in zip(found["epochs"], expected["epochs"], strict=True):
        for name in plain.keys() - of_microbatches:
            assert ours[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-5), name
    assert found["logged"] == expected["logged"]
    assert found["rates"] == expected["rates"]
    assert found["stopped_epoch"] == expected["stopped_epoch"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)


def test_callbacks_decide_alike_everywhere(one_process: Any, ranks: Any, folder: Path) -> None:
    assert 2 < one_process["tqdm"]["stopped_epoch"] < MAX_EPOCHS - 1
    assert len(set(one_process["tqdm"]["rates"])) > 1
    assert ranks[0]["tqdm"]["best"] == ranks[1]["tqdm"]["best"]
    path, score, kept = ranks[0]["tqdm"]["best"]
    expected_path, expected_score, expected_kept = one_process["tqdm"]["best"]
    assert (Path(path).name, score) == (Path(expected_path).name, expected_score)
    assert [Path(k).name for k in kept] == [Path(k).name for k in expected_kept]
    files = sorted(p.name for p in (folder / "2").glob("*.ckpt"))
    assert files == sorted([*(Path(k).name for k in kept), "last.ckpt"])


def test_numbers_that_ranks_find_differently_are_those_of_the_first(ranks: Any) -> None:
    first, other = (rank["clocks"] for rank in ranks)
    assert first == other
    assert first.keys() == {"train_clock", "train_clock_step", "train_clock_epoch", "val_clock", "val_constant"}
    assert first["val_constant"] == 2.5


@pytest.mark.parametrize("bar", ["tqdm", pytest.param("rich", marks=pytest.mark.slow)])
def test_the_progress_bar_shows_the_losses(bar: str, one_process: Any, ranks: Any) -> None:
    shown = ranks[0][bar]["shown"]
    assert shown[0]["train_loss_step"] == pytest.approx(ranks[0][bar]["losses"][0], abs=1e-3)
    assert {"train_loss_step", "train_loss_epoch", "val_loss", "val_accuracy"} <= shown[-1].keys()
    if bar == "tqdm":
        assert [s.keys() for s in shown] == [s.keys() for s in one_process[bar]["shown"]]


def test_loggers_write_once_and_what_one_process_writes(one_process: Any, ranks: Any, folder: Path) -> None:
    def rows(world: str) -> list[dict[str, str]]:
        (file,) = (folder / world / "csv").glob("version_*/metrics.csv")
        return list(csv.DictReader(file.open()))

    assert rows("2") == rows("1")
    assert {"lr-SGD", "train_loss_step", "train_accuracy_epoch", "val_precision", "mean_loss"} <= rows("2")[0].keys()
    scalars = {}
    for world in ("1", "2"):
        (run,) = (folder / world / "tensorboard").glob("version_*")
        events = EventAccumulator(str(run)).Reload()
        assert len(list(run.glob("events.*"))) == 1
        scalars[world] = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert scalars["1"] == scalars["2"]
    assert len(scalars["2"]["val_loss"]) == ranks[0]["tqdm"]["stopped_epoch"] + 1
