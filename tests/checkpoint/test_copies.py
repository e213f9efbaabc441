"""A strategy that is copied before a Trainer has it, as packages copy the arguments of Trainers, is as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO

from lightning_pipeline import PipelineStrategy

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda strategy: pickle.loads(pickle.dumps(strategy)),
}


def trainer(strategy: PipelineStrategy, **options: Any) -> L.Trainer:
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, **options)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_trainer_gives_the_copy_what_it_would_give_the_original(copied: Callable[[Any], Any]) -> None:
    original = PipelineStrategy(num_stages=1, num_microbatches=3)
    io = TorchCheckpointIO()
    for strategy in (copied(original), original):
        made = trainer(strategy, precision="bf16-mixed", plugins=[io])
        assert made.strategy.checkpoint_io is io
        assert isinstance(made.strategy.precision_plugin, MixedPrecision)
        assert made.strategy.num_microbatches == 3
    assert isinstance(copied(original).precision_plugin, MixedPrecision)  # which the Trainer has given it


def test_a_copy_has_what_the_original_was_given() -> None:
    io = TorchCheckpointIO()
    strategy = copy.copy(PipelineStrategy(num_stages=1, checkpoint_io=io))
    assert strategy.checkpoint_io is io
