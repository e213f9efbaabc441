"""Ranks that start from different values, or seeds, train what one process does with rank 0's; or are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.launching import launch
from tests.training.measured import LitLayers, measured_stages, point_loader
from tests.training.runs import differing, pipeline_trainer, plain_trainer, weights

pytestmark = pytest.mark.multiprocess

SEED = 3


class LitWithTable(LitLayers):
    """With a buffer of odd size, in a dtype that not every backend sends."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(3, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.table.sum().to(x)


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def seeded() -> L.LightningModule:
    torch.manual_seed(SEED)
    return LitWithTable()


def seeded_by_rank() -> L.LightningModule:
    torch.manual_seed(SEED + rank())
    return LitWithTable()


def seeded_on_rank_0() -> L.LightningModule:
    if rank() == 0:
        torch.manual_seed(SEED)
    else:
        torch.seed()
    return LitWithTable()


def drawn_before() -> L.LightningModule:
    torch.manual_seed(SEED)
    if rank() == 1:
        torch.rand(7)
    return LitWithTable()


def loaded_on_rank_0() -> L.LightningModule:
    values = seeded().state_dict()
    torch.seed()
    module = LitWithTable()
    if rank() == 0:
        module.load_state_dict(values)
        torch.manual_seed(SEED)
    return module


MODULES: dict[str, Callable[[], L.LightningModule]] = {
    function.__name__: function for function in (seeded_by_rank, seeded_on_rank_0, drawn_before, loaded_on_rank_0)
}


def train(module: L.LightningModule, world: int) -> dict[str, Any]:
    average = EMAWeightAveraging(decay=0.5, use_buffers=True)
    options: dict[str, Any] = {"max_epochs": 1, "callbacks": [average]}
    trainer = pipeline_trainer(measured_stages(2), world=2, **options) if world > 1 else plain_trainer(**options)
    trainer.fit(module, point_loader(32))
    return weights(trainer)


def compare() -> dict[str, Any]:
    return {name: train(make(), 2) for name, make in MODULES.items()}


def alone() -> dict[str, Any]:
    torch.manual_seed(SEED)
    return train(LitWithTable(), 1)


def test_ranks_take_rank_0s_values() -> None:
    [one] = launch(alone, world=1)
    found = launch(compare, world=2)[0]
    for name in MODULES:
        for key, value in found[name].items():
            torch.testing.assert_close(value, one[key], msg=f"{name}: {key}")
    for name in MODULES:
        assert not differing(found[name], found["drawn_before"])


def seeds() -> dict[str, str]:
    """What is told of each way to seed, "" for nothing."""
    told = {}
    for name, seed in (
        ("differing", lambda: L.seed_everything(SEED + rank(), verbose=False)),
        ("same", lambda: L.seed_everything(SEED, workers=True, verbose=False)),
        ("of the environment", lambda: L.seed_everything(verbose=False)),
    ):
        if name == "of the environment":
            os.environ["PL_GLOBAL_SEED"] = "11"
        seed()
        trainer = pipeline_trainer(measured_stages(2), world=2, max_steps=1)
        try:
            trainer.fit(LitLayers(), point_loader(16))
            told[name] = ""
        except ValueError as error:
            told[name] = str(error)
    return told


def test_seeds_that_differ_are_told_without_replicas() -> None:
    for told in launch(seeds, world=2):
        assert (
            "the ranks do not agree on seed_everything (seed_everything: 3 on rank 0, 4 on rank 1)"
            in (told["differing"])
        )
        assert "give all ranks the same seed" in told["differing"]
        assert told["same"] == told["of the environment"] == ""
