"""Ranks that differ are told so, all of them, with ranks and values, before they wait for one another."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.runtime import rendezvous
from tests.launching import PATIENCE_S, free_port, launch
from tests.training.measured import LitLayers, measured_stages, point_loader
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess

WORLD = 4  # two stages of two replicas: ranks 0 1 and 2 3
TIMEOUT = PATIENCE_S  # no case is to need it
CHECKPOINT = "after_an_epoch.ckpt"


class Other(LitLayers):
    """Another class of the same parameters."""


class Renamed(LitLayers):
    """As many parameters of the same shapes, one with another name."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.head
        del self.head


class Adam(LitLayers):
    """Another optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Unsorted(LitLayers):
    """The same optimizer, with parameters in another order, as from a set."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters()][::-1], lr=0.05, momentum=0.9)


class Breaking(LitLayers):
    """Fails where the others go on."""

    def configure_model(self) -> None:
        raise MemoryError("no room")


for variant in (Renamed, Adam, Unsorted, Breaking):
    variant.__qualname__ = LitLayers.__qualname__


class Stream(IterableDataset):
    """Points, nobody knows how many."""

    def __iter__(self) -> Any:
        yield from point_loader(32).dataset


def stream() -> DataLoader:
    return DataLoader(Stream(), batch_size=8)


@dataclass(kw_only=True)
class Run:
    """What a rank does; by default two batches of training and one of validation."""

    module: Callable[[], L.LightningModule] = LitLayers
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] = lambda: point_loader(32)
    validation: Callable[[], Any] = lambda: point_loader(16)
    function: str = "fit"
    checkpoint: str = ""
    saves: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    torch: str = torch.__version__

    def __call__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", self.torch)
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        strategy = {"num_stages": 2, "num_microbatches": 2, "timeout": TIMEOUT, **self.strategy}
        trainer = L.Trainer(
            strategy=PipelineStrategy(stage_config=measured_stages(2), **strategy),
            devices=WORLD,
            **{**QUIET, "max_epochs": 1, **self.trainer},
        )
        if self.function == "validate":
            trainer.validate(self.module(), self.validation(), verbose=False)
            return
        checkpoint = folder / self.checkpoint if self.checkpoint else None
        trainer.fit(self.module(), self.data(), self.validation(), ckpt_path=checkpoint)
        if self.saves:
            trainer.save_checkpoint(folder / CHECKPOINT)


@dataclass
class Case:
    """`other` runs on one rank or two, and `usual` on those that remain; all of them raise an error with `words`."""

    ranks: tuple[int, ...]
    other: Run
    words: str | list[str]
    usual: Run = field(default_factory=Run)


CASES = {
    "class": Case((3,), Run(module=Other), "LightningModule: LitLayers on ranks 0 1 2, Other on rank 3"),
    "parameter": Case((3,), Run(module=Renamed), "the ranks do not agree on parameters (parameters: 10 of "),
    "num_stages": Case((3,), Run(strategy={"num_stages": 4}), "num_stages: 2 on ranks 0 1 2, 4 on rank 3"),
    "impossible num_stages": Case((1,), Run(strategy={"num_stages": 3}), "num_stages: 2 on ranks 0 2 3, 3 on rank 1"),
    "strategy's options": Case(
        (0,),
        Run(strategy={"num_microbatches": 4, "schedule": "gpipe", "loss_reduction": "sum", "timeout": 900}),
        [
            "num_microbatches: 4 on rank 0, 2 on ranks 1 2 3",
            "schedule: gpipe on rank 0, 1f1b on ranks 1 2 3",
            "loss_reduction: sum on rank 0, mean on ranks 1 2 3",
            "timeout: 0:15:00 on rank 0, 0:05:00 on ranks 1 2 3",
        ],
    ),
    "Trainer's options": Case(
        (2,),
        Run(
            trainer={
                "precision": "64-true",
                "gradient_clip_val": 0.5,
                "accumulate_grad_batches": 2,
                "max_epochs": 2,
                "max_steps": 3,
                "limit_train_batches": 1,
                "callbacks": [EarlyStopping("val_loss")],
            }
        ),
        [
            "precision: '32-true' on ranks 0 1 3, '64-true' on rank 2",
            "gradient_clip_val: None on ranks 0 1 3, 0.5 on rank 2",
            "accumulate_grad_batches: 1 on ranks 0 1 3, 2 on rank 2",
            "max_epochs: 1 on ranks 0 1 3, 2 on rank 2; max_steps: -1 on ranks 0 1 3, 3 on rank 2",
            "limit_train_batches: 1.0 on ranks 0 1 3, 1 on rank 2",
            "callbacks: none on ranks 0 1 3, EarlyStopping{",
        ],
    ),
    "batches of a stage": Case(
        (2,), Run(data=lambda: point_loader(16)), "training batches: 2 on ranks 0 1 3, 1 on rank 2"
    ),
    "batches of a replica": Case(
        (1, 3), Run(data=lambda: point_loader(48)), "training batches: 2 on ranks 0 2, 3 on ranks 1 3"
    ),
    "length": Case((2,), Run(data=stream), "length of the data: known on ranks 0 1 3, unknown on rank 2"),
    "no data on a stage": Case(
        (2, 3),
        Run(data=lambda: point_loader(0)),
        "different points of the run (the start of training on ranks 0 1, the end of the run on ranks 2 3)",
    ),
    "validation batches": Case(
        (3,), Run(validation=lambda: point_loader(32)), "validation batches of replica 1: 1 on rank 1, 2 on rank 3"
    ),
    "function": Case((3,), Run(function="validate"), "the Trainer's function: fit on ranks 0 1 2, validate on rank 3"),
    "optimizer": Case((3,), Run(module=Adam), "optimizers: SGD(lr=0.05, momentum=0.9"),
    "order": Case((3,), Run(module=Unsorted), ["parameters of the optimizers: ", "sort what comes from sets"]),
    "seed": Case((3,), Run(environment={"PL_GLOBAL_SEED": "7"}), "seed_everything: 1 on ranks 0 1 2, 7 on rank 3"),
    "library": Case((3,), Run(torch="2.0.1"), f"torch: {torch.__version__} on ranks 0 1 2, 2.0.1 on rank 3"),
    "failure": Case(
        (3,), Run(module=Breaking), "rank 3 failed before it came to the set-up of the pipeline: MemoryError: no room"
    ),
    "failure of rank 0": Case(
        (0,), Run(module=Breaking), "rank 0 failed before it came to the set-up of the pipeline: MemoryError: no room"
    ),
}


MORE = {  # as others are
    *("impossible num_stages", "batches of a stage", "length", "no data on a stage", "optimizer", "library"),
    "failure of rank 0",
}


def run_all(folder: Path, names: list[str]) -> dict[str, tuple[str, float]]:
    """What each case raised, and after how many seconds."""
    rank = int(os.environ["LOCAL_RANK"])
    L.seed_everything(1, verbose=False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        Run(saves=True)(folder, monkeypatch)
    found = {}
    for name in names:
        case, started = CASES[name], time.monotonic()
        with pytest.MonkeyPatch.context() as monkeypatch:
            try:
                (case.other if rank in case.ranks else case.usual)(folder, monkeypatch)
                message = "nothing"
            except Exception as error:
                message = str(error)
        found[name] = message, time.monotonic() - started
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, wanted: Any) -> list[dict[str, tuple[str, float]]]:
    return launch(run_all, tmp_path_factory.mktemp("run"), wanted(CASES, MORE, "name"), world=WORLD)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in CASES])
def test_every_rank_is_told_what_differs(name: str, ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        message, seconds = found[name]
        expected = "no room" if "failure" in name and rank in CASES[name].ranks else CASES[name].words
        for words in [expected] if isinstance(expected, str) else expected:
            assert words in message
        assert seconds < TIMEOUT / 2


STARTS: dict[str, tuple[list[dict[str, int] | None], str]] = {
    "devices": (
        [{"node": 0, "local_rank": 0}, {"node": 0, "local_rank": 1}, {"node": 1, "local_rank": 0, "devices": 3}],
        r"rank \d \(process \d+ on .*\) counts (4|6) processes and rank \d \(.*\) counts (4|6); give the Trainer",
    ),
    "the same node twice": (
        [{"node": 0, "local_rank": 0}, {"node": 0, "local_rank": 1}, {"node": 0, "local_rank": 1}],
        r"process \d+ on .* and process \d+ on .* are both rank 1; give each node a NODE_RANK of its own",
    ),
    "a missing node": (
        [{"node": 0, "local_rank": 0}, {"node": 0, "local_rank": 1}, None],
        # On a busy machine the second process, too, may come late, and find nobody any more.
        r"(ranks (1 )?2 3 of 4 did not come to|rank 1 of 4 did not reach rank 0 at) 127.0.0.1:\d+ within 1 s",
    ),
}
"""How three processes of two nodes with two devices each are started, and what all that are started raise."""


def start_all(ports: dict[str, int], folder: Path) -> dict[str, str]:
    process = int(os.environ["LOCAL_RANK"])
    found = {}
    for name, (starts, _) in STARTS.items():
        # Whoever comes when the others have been told and gone would wait for them in vain.
        (folder / f"{name} {process}").touch()
        while any(not (folder / f"{name} {other}").exists() for other in range(len(starts))):
            time.sleep(0.01)
        start = starts[process]
        if start is None:
            continue
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(rendezvous, "LINGER_S", 1.5)
            for variable, value in {
                "NODE_RANK": start["node"],
                "LOCAL_RANK": start["local_rank"],
                "MASTER_PORT": ports[name],
            }.items():
                monkeypatch.setenv(variable, str(value))
            strategy = PipelineStrategy(stage_config=measured_stages(2), timeout=1 if "missing" in name else TIMEOUT)
            trainer = L.Trainer(strategy=strategy, devices=start.get("devices", 2), num_nodes=2, **QUIET)
            with pytest.raises((ValueError, RuntimeError)) as error:
                trainer.fit(LitLayers(), point_loader(8))
            found[name] = str(error.value)
    return found


def test_processes_that_do_not_make_up_a_world_are_told(tmp_path: Path) -> None:
    # torch waits some seconds, and longer each time, before a store's client tries again to connect.
    processes = launch(start_all, {name: free_port() for name in STARTS}, tmp_path, world=3)
    for name, (starts, words) in STARTS.items():
        for found, start in zip(processes, starts, strict=True):
            if start is not None:
                assert re.search(words, found[name])
