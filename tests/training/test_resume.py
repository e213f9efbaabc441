"""A run that SIGTERM interrupts after any batch goes on, in new processes, as if nothing had happened."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S, launch
from tests.training.measured import LitMeasured, measured_stages, points
from tests.training.resumable import ResumableLoader
from tests.training.runs import NUM_MICROBATCHES, QUIET, Losses, differing, weights

pytestmark = pytest.mark.multiprocess

PLAIN = 0  # in place of a number of stages
BATCH_SIZE, BATCHES, EPOCHS = 8, 3, 2
NEVER = 10**6


@dataclass(frozen=True)
class Case:
    """A run, and the batch during which the last rank gets SIGTERM.

    Attributes:
        randomly: shuffled, and with noise on each sample, from a loader without a state; else in order and resumable.
        measured: it logs all that `LitMeasured` does, else the losses of validation alone.
    """

    stop: int
    scheduler: str | None = None
    accumulate: int = 1
    dropout: float = 0.0
    randomly: bool = False
    fp16: bool = False
    measured: bool = False


CASES = {
    "no dropout": Case(stop=4, scheduler="one_cycle"),
    "one_cycle": Case(stop=4, scheduler="one_cycle", dropout=0.2, measured=True),
    "end of an epoch": Case(stop=2, scheduler="plateau", dropout=0.2),
    "within a window": Case(stop=3, accumulate=2),
    "random data": Case(stop=4, randomly=True),
    "fp16": Case(stop=4, fp16=True, dropout=0.2),
}
MORE = {"one_cycle", "end of an epoch", "within a window", "random data"}  # what the others show as well, or nearly so
EXACT_IN_PLAIN = [name for name, case in CASES.items() if not case.dropout]  # whose random numbers are others
# Of the others Lightning loses something: the state of a loader without one, gradients within a window, and the step
# of a ReduceLROnPlateau at the end of the epoch in which it goes on.
CONTINUED = ["no dropout", "one_cycle", "end of an epoch", "fp16"]
IN_REPLICAS = ["no dropout", "one_cycle"]
MOVED = "no dropout"


class NoisyPoints(Dataset):
    """Each sample is another one each time."""

    def __init__(self) -> None:
        self.points = points(BATCHES * BATCH_SIZE)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.points[index]
        return x + 0.1 * torch.randn(x.shape), y


class LitResumed(LitMeasured):
    """`LitMeasured` with dropout, and data of its own, which replicas share out."""

    def __init__(self, name: str, batch_size: int) -> None:
        self.case, self.batch_size = CASES[name], batch_size
        super().__init__(scheduler=self.case.scheduler)
        for layer in self.layers:
            layer.append(nn.Dropout(self.case.dropout))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.case.measured else self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.case.measured:
            super().validation_step(batch, batch_idx)
        else:
            self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if self.case.measured:
            super().on_validation_epoch_end()

    def forward(self, x: Tensor) -> Tensor:
        if self.case.measured:
            return super().forward(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def train_dataloader(self) -> Any:
        if self.case.randomly:
            return DataLoader(NoisyPoints(), self.batch_size, shuffle=True)
        shares = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        data = points(BATCHES * BATCH_SIZE)
        sampler = DistributedSampler(data, **shares, shuffle=False)
        return ResumableLoader(DataLoader(data, self.batch_size // shares["num_replicas"], sampler=sampler))

    def val_dataloader(self) -> Any:
        return DataLoader(points(BATCH_SIZE, seed=1), self.batch_size)


class Preempted(Callback):
    """SIGTERM to the last rank, before the batch with this number."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx
        if done == self.stop and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(num_stages: int, name: str, *, world: int, folder: Path | None = None, file: Path | None = None) -> Any:
    """Run, or with `folder` until the interruption, whose checkpoint goes there; or go on from `file`."""
    L.seed_everything(3, verbose=False)
    case, losses = CASES[name], Losses()
    callbacks: list[Callback] = [losses]
    size, accumulate, stop = BATCH_SIZE, case.accumulate, case.stop
    if num_stages == PLAIN:  # in batches of micro-batch size
        size, accumulate = size // NUM_MICROBATCHES, accumulate * NUM_MICROBATCHES
        stop = NUM_MICROBATCHES * (stop + 1) - 1
    if folder is not None:
        callbacks.append(Preempted(stop))
        callbacks.append(ModelCheckpoint(folder, "last", save_on_exception=True, every_n_train_steps=NEVER))
    options: dict[str, Any] = {"plugins": []}
    if case.fp16:  # growing every second step, and too large in some
        scaler = GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    if num_stages != PLAIN:
        microbatches = NUM_MICROBATCHES * num_stages // world
        options["strategy"] = PipelineStrategy(
            stage_config=measured_stages(num_stages),
            num_stages=num_stages,
            num_microbatches=microbatches,
            timeout=PATIENCE_S,
        )
    trainer = L.Trainer(
        devices=world,
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        use_distributed_sampler=False,
        **{**QUIET, **options, "enable_checkpointing": folder is not None},
    )
    if folder is None:
        trainer.fit(LitResumed(name, size), ckpt_path=file)
        return {"losses": losses.values, "weights": weights(trainer), "step": trainer.global_step}
    with pytest.raises(SIGTERMException):
        trainer.fit(LitResumed(name, size))
    return losses.values


def first_runs(num_stages: int, names: list[str], world: int, folder: Path) -> dict[str, Any]:
    return {
        name: {
            "interrupted": fit(num_stages, name, world=world, folder=folder / name),
            "whole": fit(num_stages, name, world=world),
        }
        for name in names
    }


def second_runs(num_stages: int, names: list[str], world: int, folder: Path) -> dict[str, Any]:
    return {name: fit(num_stages, name, world=world, file=folder / name / "last.ckpt") for name in names}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, wanted: Any) -> dict[str, Any]:
    """By layout and case, and by rank: the interrupted run's losses, the whole run, and the one that went on."""
    folder = tmp_path_factory.mktemp("resume")
    cases = wanted(CASES, MORE, "name")
    replicas = [name for name in IN_REPLICAS if name in cases]
    layouts = {
        "plain": (PLAIN, [name for name in EXACT_IN_PLAIN if name in cases], 1),
        "two": (2, cases, 2),
        "replicas": (2, replicas, 4),
    }

    def run(layout: str) -> list[dict[str, Any]]:
        stages, names, world = layouts[layout]
        arguments = (stages, names, world, folder / layout)
        first = launch(first_runs, *arguments, world=world)
        second = launch(second_runs, *arguments, world=world)
        return [
            {name: {**one[name], "resumed": other[name]} for name in names}
            for one, other in zip(first, second, strict=True)
        ]

    with ThreadPoolExecutor() as threads:
        found = dict(zip(layouts, threads.map(run, layouts), strict=True))
    (moved,) = launch(second_runs, 1, [MOVED], 1, folder / "replicas", world=1)
    return {**found, "moved": moved[MOVED]}


def often(names: list[str]) -> list[Any]:
    """Names of cases; those of `MORE` are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in names]


def test_it_stops_after_the_batch_in_which_one_rank_was_told(runs: Any) -> None:
    for layout in ("two", "replicas"):
        for rank in runs[layout]:
            for name, run in rank.items():
                assert len(run["interrupted"]) == CASES[name].stop + 1
                assert run["interrupted"] == run["whole"]["losses"][: CASES[name].stop + 1]


@pytest.mark.parametrize("name", often(CONTINUED))
def test_it_goes_on_as_if_it_had_not_been_interrupted(runs: Any, name: str) -> None:
    for rank in runs["two"]:
        whole, resumed = rank[name]["whole"], rank[name]["resumed"]
        assert rank[name]["interrupted"] + resumed["losses"] == whole["losses"]
        assert resumed["step"] == whole["step"]
        assert not differing(resumed["weights"], whole["weights"])


@pytest.mark.parametrize("name", often(EXACT_IN_PLAIN))
def test_it_goes_on_as_plain_lightning_does(runs: Any, name: str) -> None:
    ours, plain = runs["two"][0][name], runs["plain"][0][name]
    for run in ("whole", "resumed"):
        assert ours[run]["step"] == plain[run]["step"]
        assert not differing(ours[run]["weights"], plain[run]["weights"]), run


def test_replicas_go_on_as_well(runs: Any) -> None:
    for rank in runs["replicas"]:
        for run in rank.values():
            assert run["interrupted"] + run["resumed"]["losses"] == run["whole"]["losses"]
            assert not differing(run["resumed"]["weights"], run["whole"]["weights"])


def test_another_layout_goes_on_within_rounding(runs: Any) -> None:
    whole = runs["replicas"][0][MOVED]["whole"]
    assert runs["moved"]["step"] == whole["step"]
    for name, value in whole["weights"].items():
        torch.testing.assert_close(runs["moved"]["weights"][name], value, msg=name)
