"""The state of one micro-batch on one stage, from its inputs' arrival to its gradients' departure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pipeline.partition.absent import ValueId
from lightning_pipeline.partition.observer import Observer
from lightning_pipeline.partition.received import Received
from lightning_pipeline.partition.record import Record
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.runtime.structure import Structure
from lightning_pipeline.runtime.transport import PendingReceive, TensorMeta


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
    """One micro-batch on this stage.

    Attributes:
        index: its number in the step.
        structure: its structure; `layout` its own nesting, whose plain values may differ from the structure's.
        num_samples: its number of samples.
        weight: the share of its samples in the step's.
        num_microbatches: number of micro-batches in the step. even: whether all have as many samples.
        tensors: the batch's tensors, where this stage has them from the start (the first stage).
    """

    index: int
    structure: Structure
    layout: Layout
    num_samples: int
    weight: float
    num_microbatches: int
    even: bool
    seed: int
    tensors: list[Tensor] | None = None
    header: Header | None = None
    pending_values: list[tuple[ValueId, PendingReceive]] = field(default_factory=list)
    pending_batch: list[tuple[int, PendingReceive]] = field(default_factory=list)
    pending_gradients: list[tuple[ValueId, PendingReceive]] | None = None
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

    def keep_edges(self) -> None:
        """Keep of the outputs what backward needs: their places in the graph, not their data."""
        wanted = self.gradients_out
        for value, tensor in self.outputs.items():
            if tensor.requires_grad and (wanted is None or value in wanted):
                self.edges[value] = get_gradient_edge(tensor)
