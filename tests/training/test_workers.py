"""What data workers draw is a replica's own, and does not depend on how many stages there are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S, launch
from tests.training.runs import QUIET, plain_trainer

pytestmark = pytest.mark.multiprocess

SAMPLES, WIDTH = 8, 4


class Augmented(Dataset):
    """Its own number, and a number from each of the generators that augmentations use."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(())), random.random(), np.random.rand()])


class LitDropout(L.LightningModule):
    """Two layers with dropout, which draws in the main process as samplers do, and the batches that they saw."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(dropout))
        self.second = torch.nn.Sequential(torch.nn.Linear(WIDTH, 1), torch.nn.Dropout(dropout))
        self.seen: list[Tensor] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch.clone())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches_of(trainer: Callable[[], L.Trainer], dropout: float) -> dict[int, Tensor]:
    """By number of workers: every sample of two epochs [num_samples, WIDTH], in order."""
    found = {}
    for num_workers in (0, 2):
        L.seed_everything(3, workers=True, verbose=False)
        module = LitDropout(dropout)
        context = "fork" if num_workers else None
        data = DataLoader(
            Augmented(), batch_size=2, shuffle=True, num_workers=num_workers, multiprocessing_context=context
        )
        trainer().fit(module, data)
        found[num_workers] = torch.cat(module.seen)
    return found


def pipeline(num_stages: int, world: int) -> L.Trainer:
    config = {"second": 1} if num_stages == 2 else {}
    strategy = PipelineStrategy(stage_config=config, num_stages=num_stages, num_microbatches=2, timeout=PATIENCE_S)
    return L.Trainer(strategy=strategy, devices=world, **{**QUIET, "max_epochs": 2})


def on_two() -> dict[str, dict[int, Tensor]]:
    return {
        "plain": batches_of(lambda: plain_trainer(max_epochs=2), 0.0),
        "two stages": batches_of(lambda: pipeline(2, 2), 0.0),
        "two replicas": batches_of(lambda: pipeline(1, 2), 0.5),
    }


def on_four() -> dict[int, Tensor]:
    return batches_of(lambda: pipeline(2, 4), 0.5)


@pytest.fixture(scope="module")
def two() -> list[dict[str, dict[int, Tensor]]]:
    return launch(on_two, world=2)


def test_one_replica_sees_the_batches_of_a_plain_run(two: Any) -> None:
    for num_workers in (0, 2):
        expected = two[0]["plain"][num_workers]
        assert len(expected) == 2 * SAMPLES
        for rank in two:
            assert torch.equal(rank["two stages"][num_workers], expected)


@pytest.mark.slow
def test_a_replica_sees_the_same_batches_on_any_number_of_stages(two: Any) -> None:
    deep = launch(on_four, world=4)
    for num_workers in (0, 2):
        first, second = (rank["two replicas"][num_workers] for rank in two)
        for number, rank in enumerate(deep):
            assert torch.equal(rank[num_workers], (first, second)[number % 2])
        epoch = SAMPLES // 2
        assert len(first) == len(second) == 2 * epoch
        assert not set(first[:epoch, 0].tolist()) & set(second[:epoch, 0].tolist())


def test_workers_of_replicas_draw_different_numbers(two: Any) -> None:
    first, second = (rank["two replicas"][2] for rank in two)
    assert len(first) == len(second) == SAMPLES
    for drawn in (1, 2, 3):
        assert not set(first[:, drawn].tolist()) & set(second[:, drawn].tolist())
