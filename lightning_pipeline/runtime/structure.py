"""What is known of a structure of micro-batch, once a step has run with it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_pipeline.partition.absent import ValueId, ValueMeta
from lightning_pipeline.partition.crossing import Crossing
from lightning_pipeline.partition.observer import Usage
from lightning_pipeline.partition.record import Record
from lightning_pipeline.runtime.tensor_meta import TensorMeta


@dataclass(slots=True)
class Report:
    """What one virtual stage saw while a structure was new; every rank gets that of every one.

    Attributes:
        usage: what the stage used of what others hold.
        start: the event with which the stage began.
        leaves: names of the leaves it ran.
        gradients: values of earlier stages for which its backward had a gradient.
        dynamic: whether an event of the stage had numbers or shapes that depend on data, or the events themselves
            differed from micro-batch to micro-batch.
        events: names of the stage's events.
        passed: how the data went past the stage, if no micro-batch called a module of it.
    """

    usage: Usage = field(default_factory=Usage)
    start: int = 0
    leaves: set[str] = field(default_factory=set)
    gradients: set[ValueId] = field(default_factory=set)
    dynamic: bool = False
    events: tuple[str, ...] | None = None
    passed: str = ""

    def merge(self, other: Report) -> None:
        """Add what another micro-batch of the structure showed."""
        self.usage.values |= other.usage.values
        self.usage.batch |= other.usage.batch
        self.usage.parameters |= other.usage.parameters
        self.start = other.start
        self.leaves |= other.leaves
        self.gradients |= other.gradients
        self.dynamic |= other.dynamic or (self.events is not None and self.events != other.events)
        self.events = other.events
        self.passed = other.passed


@dataclass(frozen=True, slots=True)
class Boundary:
    """What crosses one boundary in every micro-batch of a fixed structure.

    Attributes:
        values: with how they look, in the order in which they travel.
        requires_grad: those of them that require grad.
        gradients: the values whose gradients come back, likewise in order.
    """

    values: tuple[tuple[ValueId, TensorMeta], ...]
    requires_grad: frozenset[ValueId]
    gradients: tuple[tuple[ValueId, TensorMeta], ...]


@dataclass(slots=True)
class Structure:
    """One structure of micro-batch, as a rank knows it. Stages here are virtual ones, counted along the data.

    A structure is settled once every stage has reported on it: then both sides of a boundary know which values cross
    it and nothing but these is sent. In a dynamic one, whose shapes or numbers depend on data, each micro-batch goes
    on carrying its record.

    Attributes:
        records: for each stage of this rank, the events up to its end.
        metas: how values that cross the boundaries of these stages look.
        crossing: for each boundary (after stage 0, 1, ...), the values that cross it.
        gradients: for each boundary, those of them whose gradient comes back.
        batch: for each stage, numbers of the batch's tensors that it uses.
        batch_of_rank: for each rank, numbers of those that one of its stages uses.
        batch_metas: how the micro-batch's tensors look.
        fixed: micro-batches cross boundaries without a record: settled, and not dynamic.
    """

    key: Hashable
    number: int
    records: dict[int, Record] = field(default_factory=dict)
    metas: dict[ValueId, tuple[TensorMeta, bool]] = field(default_factory=dict)
    crossing: list[tuple[ValueId, ...]] = field(default_factory=list)
    gradients: list[tuple[ValueId, ...]] = field(default_factory=list)
    batch: list[tuple[int, ...]] = field(default_factory=list)
    batch_of_rank: list[tuple[int, ...]] = field(default_factory=list)
    batch_metas: list[ValueMeta] = field(init=False)
    settled: bool = False
    dynamic: bool = False
    fixed: bool = False
    _boundaries: dict[int, Boundary] = field(default_factory=dict)
    _crossings: dict[int, Crossing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch_metas = [ValueMeta(*meta) for meta in self.key[1][1]]  # type: ignore[index]

    def settle(self, reports: list[Report], placement: Sequence[int]) -> None:
        """Work out from the stages' reports what crosses each boundary. `placement`: the rank of each stage."""
        used_later: set[ValueId] = set()
        self.crossing, self.gradients = [], []
        for stage in range(len(reports) - 1, 0, -1):
            used_later |= reports[stage].usage.values
            crossing = sorted(value for value in used_later if value[0] < reports[stage].start)
            self.crossing.insert(0, tuple(crossing))
            self.gradients.insert(0, tuple(value for value in crossing if value in reports[stage].gradients))
        self.batch = [tuple(sorted(report.usage.batch)) for report in reports]
        self.batch_of_rank = [
            tuple(sorted({i for used, place in zip(self.batch, placement, strict=True) if place == rank for i in used}))
            for rank in range(max(placement) + 1)
        ]
        # What only the last stage's own code depends on, nobody else has to know.
        self.dynamic = any(report.dynamic for report in reports[:-1])
        self.settled = True
        self.fixed = not self.dynamic

    def boundary(self, stage: int) -> Boundary:
        """Of a fixed structure, what crosses the boundary after a stage."""
        found = self._boundaries.get(stage)
        if found is None:
            found = self._boundaries[stage] = Boundary(
                tuple((value, self.metas[value][0]) for value in self.crossing[stage]),
                frozenset(value for value in self.crossing[stage] if self.metas[value][1]),
                tuple((value, self.metas[value][0]) for value in self.gradients[stage]),
            )
        return found

    def crossing_after(self, stage: int, modules: dict[str, nn.Module]) -> Crossing | None:
        """Of a fixed structure, what keeps these values while a stage of this rank runs; None after the last one."""
        if stage == len(self.crossing):
            return None
        found = self._crossings.get(stage)
        if found is None:
            record = self.records[stage]
            found = self._crossings[stage] = Crossing(
                self.crossing[stage], record.starts.get(stage, 0), record.events, modules
            )
        return found
