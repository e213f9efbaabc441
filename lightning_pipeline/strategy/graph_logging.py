"""Loggers that trace the whole module, as `TensorBoardLogger(log_graph=True)` does with its `example_input_array`.

Lightning asks for it after set-up, when no rank holds the whole module any more, so it is done just before the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_pipeline.partition.overrides import Override
from lightning_pipeline.partition.placeholder import AbsentDataError
from lightning_pipeline.partition.rng import random_states, set_random_states

from .._lightning import LightningModule, rank_zero_warn


def log_graphs(module: LightningModule, device: torch.device, broadcast: Callable[[Any], Any]) -> bool:
    """Have loggers log the graph of a module that the first rank still holds as a whole. Returns whether they could.

    All ranks must call it. What the forward draws of random numbers there, all ranks draw, as in one process.
    """
    loggers = module.trainer.loggers
    if not loggers or module.example_input_array is None or any(one.is_meta for one in module.parameters()):
        return False
    before = random_states(device)
    for logger in loggers:
        logger.log_graph(module)  # on the first rank; the others' loggers do nothing
    after = random_states(device)
    if (drawn := broadcast(None if after == before else after)) is not None:
        set_random_states(drawn, device)
    return True


def skip_graphs(module: LightningModule, override: Override, *, are_logged: bool) -> None:
    """Have loggers log no graph of a module of which each rank holds a part."""
    for logger in module.trainer.loggers:
        override(logger, "log_graph", (lambda *args, **kwargs: None) if are_logged else partial(_try, logger.log_graph))


def _try(log_graph: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    try:
        log_graph(*args, **kwargs)
    except AbsentDataError:
        rank_zero_warn(
            "The module's graph is not logged: no rank holds all of the module. Log it before the run, with "
            "logger.experiment.add_graph(module, module.example_input_array)"
        )
