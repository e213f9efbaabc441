"""Costs of a LightningModule's steps, found out without a trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.costs import StepCosts
from lightning_pipeline.partition.estimate import estimate_step
from lightning_pipeline.partition.observed_run import called_names
from lightning_pipeline.partition.random import generators, generators_kept
from lightning_pipeline.partition.timing import time_step
from lightning_pipeline.partition.trace import trace_step
from lightning_pipeline.partition.untouched import left_as_it_was
from lightning_pipeline.partition.work import measured_speed
from lightning_pipeline.runtime.collectives import over_all_refused
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.strategy.batch_norms import own_statistics
from lightning_pipeline.strategy.steps import loss_in

SeededStep = Callable[..., Tensor | None]
"""A `Step` that takes a `seed`, too."""

_OTHER_SEEDS = (1, 2, 3)


@contextmanager
def unnoticed(module: LightningModule, device: torch.device) -> Iterator[None]:
    """While entered, steps run that nobody is to notice: not the module, not its loggers, not random numbers, and not
    other ranks, which may run them more often, or not at all."""
    trainer = module.trainer
    loggers = trainer.loggers
    with left_as_it_was(module), generators_kept(device), _by_itself(module, trainer.strategy):
        trainer.loggers = [DummyLogger() for _ in loggers]
        vars(module)["log"] = lambda *args, **kwargs: None
        try:
            yield
        finally:
            trainer.loggers = loggers
            vars(module).pop("log", None)


@contextmanager
def _by_itself(module: LightningModule, strategy: Strategy) -> Iterator[None]:
    """While entered, what a step exchanges with replicas is what it would be if all were like this one."""
    replicas: Replicas | None = strategy.replicas  # type: ignore[attr-defined]

    def all_gather(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if replicas is None else torch.stack([tensor] * replicas.num_replicas)

    alone = {"all_gather": all_gather, "reduce": lambda tensor, *args, **kwargs: tensor, "barrier": lambda *args: None}
    vars(strategy).update(alone)
    try:
        with own_statistics(module, replicas):
            yield
    finally:
        for name in alone:
            vars(strategy).pop(name, None)


def loss_step(
    module: LightningModule,
    name: str,
    others: tuple[Any, ...],
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
) -> SeededStep:
    """One of the user's steps as a function from a micro-batch to the loss that backward starts from, None for steps
    without one.

    With the same seed it draws the same random numbers, so that layers that are left out at random are the same ones.
    A training step without a loss is a ValueError.

    Args:
        name: of the step, such as "training_step".
        others: its arguments after the batch.
        context: the precision's context around a step.
    """
    function = getattr(module, name)
    drawn_from = generators(device)

    def step(microbatch: Any, seed: int = 0) -> Tensor | None:
        _plant_seeds(drawn_from, seed)
        with context():
            result = function(microbatch, *others)
        return loss_in(result, type(module).__name__) if name == "training_step" else None

    return step


def measure_step(module: LightningModule, step: SeededStep, microbatch: Any, device: torch.device) -> StepCosts:
    """Run it a few times, on the device where the whole module is."""
    speed = measured_speed(device, dtype_of(module))
    with over_all_refused():
        trace = trace_step(module, step, tree.replace(microbatch, Tensor.clone), speed)
    for seed in _OTHER_SEEDS:
        names = called_names(module, partial(step, seed=seed), tree.replace(microbatch, Tensor.clone))
        trace.optional |= names.symmetric_difference(trace.names)
    forward, backward = time_step(module, step, microbatch, trace, device)
    return StepCosts(module, trace, forward, backward, is_measured=True)


def estimate_training_step(module: LightningModule, microbatch: Any, device: torch.device) -> StepCosts:
    """Without running it: parts of the module may be on the meta device."""
    takes_index = len(signature(module.training_step).parameters) > 1
    context = module.trainer.precision_plugin.train_step_context
    step = loss_step(module, "training_step", (0,) * takes_index, context, device)
    return estimate_step(module, step, microbatch, measured_speed(device, dtype_of(module)))


def dtype_of(module: torch.nn.Module) -> torch.dtype:
    """What the module computes in, as far as its parameters tell."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _plant_seeds(drawn_from: list[torch.Generator], seed: int) -> None:
    for generator in drawn_from:  # torch.manual_seed asks every kind of device, which is longer than a small layer
        generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
