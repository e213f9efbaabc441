"""A moving average that a step takes is taken for each micro-batch, which is told."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_pipeline import PipelineStrategy
from tests.habits.modules import WIDTH, Layers
from tests.launching import PATIENCE_S, launch
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess


class WithTeacher(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                self.follow(own, other)
        return super().training_step(batch, batch_idx)

    def follow(self, own: Tensor, other: Tensor) -> None:
        raise NotImplementedError


class Lerps(WithTeacher):
    def follow(self, own: Tensor, other: Tensor) -> None:
        own.lerp_(other, 0.1)


class AssignsData(WithTeacher):
    """As MoCo does."""

    def follow(self, own: Tensor, other: Tensor) -> None:
        own.data = own.data * 0.9 + other.data * 0.1


class Copies(WithTeacher):
    """Which comes to the same for each micro-batch."""

    def follow(self, own: Tensor, other: Tensor) -> None:
        own.copy_(other)


class Normed(Layers):
    """Batch norms take averages of batches, and spectral norms iterate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(WIDTH))
        self.layers.append(spectral_norm(nn.Linear(WIDTH, WIDTH)))


TOLD: dict[type[Layers], bool] = {Lerps: True, AssignsData: True, Copies: False, Normed: False}


def warned() -> dict[str, list[str]]:
    """What each module was told, with two stages."""
    found = {}
    for module in TOLD:
        L.seed_everything(1, verbose=False)
        made = module()
        generator = torch.Generator().manual_seed(2)
        loader = torch.utils.data.DataLoader([made.batch(generator) for _ in range(3)], batch_size=None)
        strategy = PipelineStrategy(num_microbatches=4, stage_config={"layers.2": 1}, timeout=PATIENCE_S)
        trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=1, **QUIET)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(made, loader)
        found[module.__name__] = [str(one.message) for one in caught if "takes in" in str(one.message)]
    return found


def test_averages_in_steps_are_told_once() -> None:
    first, other = launch(warned, world=2)
    assert not any(other.values())
    for module, is_told in TOLD.items():
        assert len(first[module.__name__]) == is_told, (module, first)
    for module in (Lerps, AssignsData):
        [message] = first[module.__name__]
        assert "teacher.0.linear.weight takes in layers.0.linear.weight in training_step" in message
        assert "test_averages.py" in message and "each of 4 micro-batches" in message
