"""The task of one step, and the count of live activations."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.suspended import BatchWork
from lightning_pipeline.recording.step_gradients import StepGradients


@dataclass(slots=True, kw_only=True)
class StepTask:
    """What a step does with its micro-batches.

    Attributes:
        kind: which of the user's steps this is; recordings of different kinds are kept apart.
        step: runs the step on one micro-batch. Returns its result and the loss.
        loss_of: computes the tensor that backward starts from, given a micro-batch's loss; None without backward.
        after_backward: called after each micro-batch's backward on a virtual stage, with the stage.
        results_on: the rank that receives the step's results; None for all.
        waits: whether ranks synchronize at the end of the step even if they have nothing to exchange.
        can_split: whether backward from a loss is torch's own, which can be split into I and W.
        seed: seed of the step; each micro-batch derives its own.
        gradients: how the step clears and reads those of parameters.
        batch: callbacks for a hand-optimized step, whose micro-batches synchronize; None for other steps.
    """

    kind: Hashable
    step: Callable[[Microbatch, Any], tuple[Any, Any]]
    loss_of: Callable[[Microbatch, Tensor], Tensor] | None = None
    run_backward: Callable[..., None] = torch.autograd.backward
    after_backward: Callable[[int, Microbatch], None] = lambda stage, microbatch: None
    results_on: int | None = None
    waits: bool = True
    can_split: bool = True
    seed: int
    gradients: StepGradients = field(default_factory=StepGradients)
    batch: BatchWork | None = None


@dataclass(slots=True)
class LiveCount:
    """Number of virtual stages' activations that are alive on a rank's device, now and at the peak."""

    now: float = 0
    peak: float = 0

    def add(self, share: float = 1) -> None:
        self.now += share
        self.peak = max(self.peak, self.now)
