"""What a step asks of every stage, and the count of live activations."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.suspended import BatchWork


@dataclass(slots=True, kw_only=True)
class StepTask:
    """What a step does with its micro-batches.

    Attributes:
        kind: which of the user's steps; structures of different kinds are kept apart.
        step: runs the step on one micro-batch. Returns its result, and the loss in it.
        loss_of: what backward starts from, of a micro-batch's loss; None without backward.
        run_backward: runs backward from a loss.
        after_backward: called after each micro-batch's backward on a virtual stage, with the stage.
        results_on: the rank that gets what the step returns; None for all.
        waits: ranks wait for one another at the step's end, even if it leaves nothing that others need.
        can_split: whether backward from a loss is torch's own, which can be split into I and W.
        seed: seed of the step; each micro-batch derives its own.
        batch: what the batch does where the steps of its micro-batches meet; None where they never do.
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
    batch: BatchWork | None = None


@dataclass(slots=True)
class LiveCount:
    """Activations of virtual stages that a rank holds, now and at most."""

    now: int = 0
    peak: int = 0

    def add(self) -> None:
        self.now += 1
        self.peak = max(self.peak, self.now)
