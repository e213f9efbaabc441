"""Trains the architectures one after the other in the processes of a launch."""

from __future__ import annotations

import logging
import traceback
import warnings
from typing import Any

import lightning as L
import torch

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S
from tests.models.architectures import ARCHITECTURES
from tests.models.zoo_worker import Recorder, quiet_trainer, split
from tests.training.runs import measured_shortly

NUM_MICROBATCHES = 4


def train(num_stages: int, names: list[str]) -> dict[str, Any]:
    """For each model the gradients of each step that this rank has, losses and where it was cut; or the traceback.

    With 0 stages plain Lightning trains, over the same micro-batches.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    for name in names:
        try:
            with measured_shortly():
                found[name] = _fit(name, num_stages)
        except Exception:
            found[name] = traceback.format_exc()
            if num_stages > 1:
                break  # the stages may not be in step any more
    return found


def _fit(name: str, num_stages: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = ARCHITECTURES[name].build()
    batches = ARCHITECTURES[name].batches()
    strategy: Any = "auto"
    accumulate = 1
    if num_stages:
        strategy = PipelineStrategy(num_microbatches=NUM_MICROBATCHES, timeout=PATIENCE_S)
    else:
        batches = [part for batch in batches for part in split(batch)]
        accumulate = NUM_MICROBATCHES
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max(num_stages, 1), callbacks=[recorder], accumulate_grad_batches=accumulate)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    plan = getattr(trainer.strategy, "plan", None)
    return {
        "gradients": recorder.result.gradients,
        "losses": recorder.result.losses,
        "plan": plan and plan.stage_config,
    }
