"""`sync_pipeline_shared_parameters`."""

from __future__ import annotations

from lightning_pipeline.engine.shared_parameters import spread_from_owner

from .._lightning import LightningModule
from .pipeline import pipeline_of


def sync_pipeline_shared_parameters(module: LightningModule) -> None:
    """Give every stage that holds a shared parameter its owner's value: the first stage that uses it.

    Training keeps them equal by itself, and so does loading a checkpoint through the Trainer. This is for weights that
    were changed by hand on one stage. All ranks must call it; with one stage it does nothing. After MindSpore's
    function of this name.

    Args:
        module: a module that a Trainer with the pipeline strategy has set up.

    Raises:
        ValueError: the module is attached to no such Trainer.
    """
    strategy = pipeline_of(module._trainer) if module._trainer is not None else None
    if strategy is None or strategy.ownership is None:
        raise ValueError(
            f"{type(module).__name__} is not set up by a pipeline; call sync_pipeline_shared_parameters in a hook, or "
            f"after trainer.fit, validate, test or predict with PipelineStrategy"
        )
    holders = strategy.ownership.holders
    shared = {
        id(parameter): (parameter, holders[name])
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if len(holders[name]) > 1
    }
    spread_from_owner(list(shared.values()), strategy.transport, strategy.ownership.stage)
