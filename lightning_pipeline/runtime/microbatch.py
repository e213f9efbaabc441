"""The state of one micro-batch on one virtual stage, from its inputs' arrival to its gradients' departure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_pipeline.partition.absent import ValueId
from lightning_pipeline.partition.observer import Observer
from lightning_pipeline.partition.received import Received
from lightning_pipeline.partition.record import Record
from lightning_pipeline.partition.split_backward import SplitBackward
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.runtime.structure import Structure
from lightning_pipeline.runtime.tensor_meta import TensorMeta


class Arriving(Protocol):
    """A tensor on its way to this stage."""

    def wait(self, what: str) -> Tensor: ...


class Here:
    """A tensor of the virtual stage before or after this one, where both are on one rank."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self, what: str) -> Tensor:
        return self._tensor


@dataclass(slots=True)
class Header:
    """Goes before the values of a micro-batch whose structure is not fixed.

    Attributes:
        record: the events before the boundary.
        values: the values that follow: number, metadata, whether they require grad.
        aliases: values that share memory, by group.
        gradients: values whose gradients come back, where it is known; None sends word with the gradients.
    """

    record: Record
    values: list[tuple[ValueId, TensorMeta, bool]]
    aliases: dict[ValueId, int]
    gradients: tuple[ValueId, ...] | None


@dataclass(slots=True)
class Microbatch:
    """One micro-batch on one virtual stage.

    Attributes:
        index: its number in the step.
        structure: its structure; `layout` its own nesting, whose plain values may differ from the structure's.
        num_samples: its number of samples.
        weight: the share of its samples in the step's.
        num_microbatches: number of micro-batches in the step. even: whether all have as many samples.
    """

    index: int
    structure: Structure
    layout: Layout
    num_samples: int
    weight: float
    num_microbatches: int
    even: bool
    seed: int
    header: Header | None = None
    pending_values: list[tuple[ValueId, Arriving]] = field(default_factory=list)
    pending_gradients: list[tuple[ValueId, Arriving]] | None = None
    received: Received | None = None
    observer: Observer | None = None
    outputs: dict[ValueId, Tensor] = field(default_factory=dict)
    edges: dict[ValueId, GradientEdge] = field(default_factory=dict)
    metas: dict[ValueId, TensorMeta] = field(default_factory=dict)
    gradients_out: tuple[ValueId, ...] | None = None
    """Values of the next boundary whose gradients come back; None until it is known here, or the next stage tells."""
    gradients_in: tuple[ValueId, ...] | None = ()
    """Values of the previous boundary whose gradients go back; None where it is found out in backward."""
    result: Any = None
    loss: Tensor | None = None
    split: SplitBackward | None = None
    """Between the two halves of a split backward."""
