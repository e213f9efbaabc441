"""Several watch the actions of training steps at once, and none gets those of validation."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_pipeline.schedules import Kind
from tests.launching import launch
from tests.training.models import LitTokens, token_loader
from tests.training.runs import pipeline_trainer

NUM_MICROBATCHES, NUM_STEPS = 4, 3


class Forwards(Callback):
    """Counts the forwards that it gets, in all steps but the first and the last."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, span: Any) -> None:
        self.count += span[0].kind is Kind.F

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.strategy.observers.add(self.note)
        if batch_idx == NUM_STEPS - 1:
            trainer.strategy.observers.discard(self.note)


class ByAttribute(Forwards):
    """The same of all steps, by the pipeline's own attribute."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.pipeline.observe = self.note

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.pipeline.observe = None


def counts() -> list[int]:
    watching = [Forwards(), ByAttribute(), Forwards()]
    trainer = pipeline_trainer(
        {},
        world=1,
        strategy={"num_microbatches": NUM_MICROBATCHES},
        callbacks=watching,
        max_steps=NUM_STEPS,
        val_check_interval=1,
    )
    trainer.fit(LitTokens(), token_loader(8 * NUM_STEPS, 8), token_loader(8, 8))
    return [callback.count for callback in watching]


@pytest.mark.multiprocess
def test_each_observer_gets_each_action_of_training_steps() -> None:
    in_the_middle = (NUM_STEPS - 2) * NUM_MICROBATCHES
    assert launch(counts, world=1) == [[in_the_middle, NUM_STEPS * NUM_MICROBATCHES, in_the_middle]]
