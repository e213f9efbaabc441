"""One micro-batch of a step on this rank, from its recording to the last of its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_pipeline.partition.contents import Content
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.program import Program, Strand
from lightning_pipeline.partition.recording import Recording
from lightning_pipeline.partition.split_backward import SplitBackward
from lightning_pipeline.partition.tree import Layout


class Arriving(Protocol):
    """A tensor on its way to this rank."""

    def wait(self, what: str) -> Tensor: ...


class Here:
    """A tensor of the visit before or after, where both are on one rank."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self, what: str) -> Tensor:
        return self._tensor


@dataclass(slots=True)
class Inside:
    """A micro-batch on one visit.

    Attributes:
        arriving: what is on its way from the visit before, in the plan's order.
        arriving_gradients: likewise from the visit after.
        received: leaves of the visit's graph.
        edges: where the gradients of what was sent enter the graph.
    """

    arriving: list[Arriving] | None = None
    arriving_gradients: list[Arriving] | None = None
    received: dict[Strand, Tensor] = field(default_factory=dict)
    edges: dict[Strand, GradientEdge | Tensor] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)
    outputs: list[tuple[Strand, Tensor]] = field(default_factory=list)
    split: SplitBackward | None = None
    is_posted: bool = False
    are_gradients_posted: bool = False


@dataclass(slots=True)
class Microbatch:
    """One micro-batch.

    Attributes:
        index: its number in the step.
        layout, tensors: the batch: data, or None for what only the first rank has.
        num_samples: its number of samples.
        weight: the share of its samples in the step's.
        num_microbatches: number of micro-batches in the step. even: whether all have as many samples.
        seed: from which its random numbers derive.
        recording: of the user's step, once it has run.
        result: what that returned; placeholders until the step's end.
        loss: of a training step: the value that backward starts from, or a tensor that every rank has.
        contents: of what the recording has taken along, in brief.
        gradients: what `retain_grad` was called on, with its gradient.
        kept: data of values that are asked for after the step, on the rank that has computed them.
    """

    index: int
    structure: int
    layout: Layout
    num_samples: int
    weight: float
    num_microbatches: int
    even: bool
    seed: int
    tensors: list[Tensor] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    recording: Recording | None = None
    program: Program | None = None
    result: Any = None
    loss: Any = None
    loss_value: int = -1
    contents: Content = ()
    logged: list[Any] = field(default_factory=list)
    asked: tuple[int, ...] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)
    places: dict[int, Placeholder] = field(default_factory=dict)
    loss_tensor: Tensor | None = None
    inside: dict[int, Inside] = field(default_factory=dict)
    gradients: list[tuple[Placeholder, Tensor | None]] = field(default_factory=list)
    is_done: bool = False

    def on(self, visit: int) -> Inside:
        """Its state on a visit."""
        found = self.inside.get(visit)
        if found is None:
            found = self.inside[visit] = Inside()
        return found

