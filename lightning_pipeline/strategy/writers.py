"""Prediction writers, where a rank has no predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

_METHODS = ("write_on_batch_end", "write_on_epoch_end")


def silence_writers(trainer: Trainer) -> Callable[[], None]:
    """Have prediction writers write nothing on this rank. Returns a function that undoes it."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    writers = [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
    for writer in writers:
        vars(writer).update(dict.fromkeys(_METHODS, _write_nothing))

    def undo() -> None:
        for writer in writers:
            for name in _METHODS:
                vars(writer).pop(name, None)

    return undo


def _write_nothing(*arguments: Any) -> None:
    pass
