"""Several watch the actions of training steps at once, and none gets those of validation."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lightning_pipeline.schedules import Kind
from tests.training.models import LitGPT, token_loader
from tests.training.runs import pipeline_trainer

NUM_MICROBATCHES, NUM_STEPS = 4, 3


class Watch(Callback):
    """Counts forwards: from the second step on until the last one, but not in it."""

    def __init__(self) -> None:
        self.forwards = 0

    def note(self, span: Any) -> None:
        self.forwards += span[0].kind is Kind.F

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        change = {1: trainer.strategy.observers.add, NUM_STEPS - 1: trainer.strategy.observers.discard}
        change.get(batch_idx, lambda note: None)(self.note)


class Slot(Callback):
    """Counts all forwards, by the pipeline's own attribute."""

    def __init__(self) -> None:
        self.forwards = 0

    def note(self, span: Any) -> None:
        self.forwards += span[0].kind is Kind.F

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.pipeline.observe = self.note

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.pipeline.observe = None


def test_each_observer_gets_each_action_of_training_steps() -> None:
    L.seed_everything(1, verbose=False)
    first, slot, second = Watch(), Slot(), Watch()
    trainer = pipeline_trainer(
        {},
        world=1,
        strategy={"num_microbatches": NUM_MICROBATCHES},
        callbacks=[first, slot, second],
        max_steps=NUM_STEPS,
        val_check_interval=1,
    )
    trainer.fit(LitGPT(), token_loader(8 * NUM_STEPS, 8), token_loader(8, 8))
    assert slot.forwards == NUM_STEPS * NUM_MICROBATCHES
    assert first.forwards == second.forwards == (NUM_STEPS - 2) * NUM_MICROBATCHES
