"""A step of the pipeline: the batch is delivered, the schedule runs, and what was new is settled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.microbatch import batch_size, num_rows, signature
from lightning_pipeline.partition.random import mix
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.runtime.collectives import over_all_refused
from lightning_pipeline.runtime.delivery import BatchDelivery
from lightning_pipeline.runtime.executor import Program, Span
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.site import stage_term
from lightning_pipeline.runtime.stage import Stage
from lightning_pipeline.runtime.structure import Report, Structure
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.work import LiveCount, Work
from lightning_pipeline.schedules import Schedule, forward_only, lower

MAX_STRUCTURES = 64
"""Structures that are remembered; the one that was not seen for longest goes first."""


@dataclass(slots=True)
class Announcement:
    """What the first stage tells the others of a step: each micro-batch's structure and size.

    Attributes:
        numbers: each micro-batch's structure, by number.
        sizes: each micro-batch's number of samples.
        new: key and layout of structures that were not announced before, by number.
        layouts: layouts that differ from their structure's in plain values, by micro-batch.
    """

    numbers: list[int]
    sizes: list[int]
    new: dict[int, tuple[Hashable, Layout]]
    layouts: dict[int, Layout]


Reports = dict[int, dict[int, Report]]


@dataclass(slots=True)
class StepReport:
    """What a step came to on this rank.

    Attributes:
        microbatches: the micro-batches of the rank's last virtual stage.
        reports: by virtual stage, and then by number of the structure.
        training: whether it was a training step.
    """

    microbatches: list[Microbatch]
    reports: Reports
    training: bool


class Pipeline:
    """Runs steps on this rank's virtual stages.

    Args:
        rank: this rank's place in the pipeline.
        placement: the rank of each virtual stage; the first one is on rank 0.
        schedule: the schedule of a training step with some number of micro-batches, on this placement.
        num_microbatches: micro-batches a step; a batch of fewer samples makes fewer.
    """

    def __init__(
        self,
        *,
        rank: int,
        placement: Sequence[int],
        device: torch.device,
        transport: Transport | None,
        interception: Interception,
        schedule: Callable[[int], Schedule],
        num_microbatches: int,
    ) -> None:
        self.rank = rank
        self.placement = tuple(placement)
        self.num_ranks = max(placement) + 1
        self.num_virtual_stages = len(placement) // self.num_ranks
        self.last_rank = placement[-1]
        self.num_microbatches = num_microbatches
        self.interception = interception
        self.observe: Callable[[Span], None] | None = None
        """Gets every action of a step with its start and end."""
        self.learning = False
        """Whether the last step had a structure that was not known before."""
        self.peak_live = 0
        """The most activations of virtual stages that were live on this rank at once in the last step."""
        self.stages = [stage for stage, place in enumerate(placement) if place == rank]
        """This rank's virtual stages, ascending."""
        if len(self.stages) > 1:
            interception.stages.check_placement(placement)
            interception.keep_stages_apart()
        self._device = device
        self._transport = transport
        self._schedule = schedule
        self._programs: dict[tuple[bool, int], Program] = {}
        self._structures: OrderedDict[int, Structure] = OrderedDict()
        self._by_key: dict[Hashable, int] = {}
        self._layouts: dict[int, Layout] = {}
        self._next_number = 0
        self._templates: dict[Hashable, Structure] = {}
        self._known_leaves: dict[int, set[str]] = {}

    def run(self, work: Work, microbatches: list[Any] | None) -> StepReport:
        """Run one step. `microbatches` is the first rank's; the others receive theirs."""
        announcement, tensors = self._announce(work, microbatches)
        structures = [self._structures[number] for number in announcement.numbers]
        delivery = BatchDelivery(
            structures,
            tensors,
            self._transport,
            stages=self.stages,
            rank=self.rank,
            num_ranks=self.num_ranks,
            device=self._device,
        )
        live = LiveCount()
        stages = {
            stage: Stage(
                stage,
                self.placement,
                device=self._device,
                interception=self.interception,
                transport=self._transport,
                delivery=delivery,
                microbatches=self._states(work, announcement, structures),
                work=work,
                live=live,
                template=self._templates.get(work.kind),
            )
            for stage in self.stages
        }
        for stage in stages:
            if stage + 1 in stages:
                stages[stage].following, stages[stage + 1].preceding = stages[stage + 1], stages[stage]
        self.learning = observing = not all(structure.fixed for structure in structures)
        program = self.program(training=work.loss_of is not None, num_microbatches=len(structures))
        installed = self.interception.installed(observing=observing, splitting=program.splits)
        # What a step calls is known once it has been observed.
        with self.interception.streams.kept(), installed, over_all_refused() if observing else nullcontext():
            delivery.begin()
            program.run(stages, self.observe)
        if self._transport is not None:
            self._transport.flush()
        self.peak_live = live.peak
        reports = {number: stage.reports for number, stage in stages.items()}
        last = stages[self.stages[-1]]
        return StepReport(last.microbatches, reports, training=work.loss_of is not None)

    def use(self, schedule: Callable[[int], Schedule]) -> None:
        """Run training steps by other schedules, on the same placement, from now on. All ranks must call it."""
        if schedule is not self._schedule:
            self._schedule = schedule
            self._programs = {key: program for key, program in self._programs.items() if not key[0]}

    def program(self, *, training: bool, num_microbatches: int) -> Program:
        """This rank's actions, sends and receives included."""
        key = (training, num_microbatches)
        if key not in self._programs:
            if training:
                schedule = self._schedule(num_microbatches)
            else:
                schedule = forward_only(self.num_ranks, num_microbatches, placement=self.placement)
            self._programs[key] = Program(lower(schedule)[self.rank])
        return self._programs[key]

    def is_new(self, report: StepReport) -> bool:
        """Whether this rank saw something in the step that the others have to know."""
        if any(not state.structure.settled for state in report.microbatches):
            return True
        called = self.interception.called
        return any(not called[stage] <= self._known_leaves.get(stage, set()) for stage in self.stages)

    def all_reports(self, report: StepReport) -> Reports:
        """Every stage's reports on a step that showed something new; all ranks call it after the same step."""
        own = self._own_reports(report)
        if self._transport is None:
            return own
        reports: Reports = {}
        for rank in range(self.num_ranks):
            reports.update(self._transport.broadcast_object(own, rank, "reports on a new structure"))
        return reports

    def _own_reports(self, report: StepReport) -> Reports:
        """This rank's reports, empty ones where there was nothing to report."""
        numbers = sorted({state.structure.number for state in report.microbatches})
        reports = {
            stage: {number: found.get(number, Report()) for number in numbers}
            for stage, found in report.reports.items()
        }
        for stage in self.stages:
            reports[stage][numbers[0]].leaves |= self.interception.called[stage]
        return reports

    def settle(self, report: StepReport, reports: Reports) -> None:
        """Take in every stage's reports on the step's new structures; all ranks call it after the same step.

        Raises:
            ValueError: a stage ran no module, neither in this training step nor before.
        """
        numbers = sorted({state.structure.number for state in report.microbatches})
        by_stage = [reports[stage] for stage in range(len(self.placement))]
        if report.training:
            self._note_leaves([list(found.values()) for found in by_stage])
        for number in numbers:
            structure = self._structures[number]
            if structure.settled:
                continue
            structure.settle([found[number] for found in by_stage], self.placement)
            if not structure.dynamic:
                self._templates[structure.key[0]] = structure  # type: ignore[index]
        for stage in self.stages:
            self._known_leaves[stage] = set(self.interception.called[stage])

    def _note_leaves(self, reports: list[list[Report]]) -> None:
        """Note which virtual stage runs which leaf; `reports` by stage."""
        ran = [set().union(*(report.leaves for report in stage_reports)) for stage_reports in reports]
        for stage, names in enumerate(ran):
            if not names and stage > 0:
                passed = next((report.passed for report in reports[stage] if report.passed), "the step ended before")
                term = stage_term(self.placement)
                raise ValueError(
                    f"{term} {stage} is never reached: {passed}, and no micro-batch of this training step called a "
                    f"module of {term} {stage}; name the first module that runs there in stage_config"
                )
        for leaf in self.interception.leaves:
            stages = [stage for stage, names in enumerate(ran) if leaf.name in names]
            if stages and next(leaf.module.parameters(), None) is not None:
                leaf.seen = min(stages[0], leaf.seen if leaf.seen is not None else stages[0])

    # -- details ----------------------------------------------------------------------------------------------------

    def _announce(self, work: Work, microbatches: list[Any] | None) -> tuple[Announcement, list[list[Tensor]] | None]:
        """What the step's micro-batches are, and on the first rank their tensors."""
        tensors: list[list[Tensor]] | None = None
        if self.rank == 0:
            assert microbatches is not None
            announcement, tensors = self._describe(work.kind, microbatches)
            for peer in range(1, self.num_ranks):
                assert self._transport is not None
                self._transport.send_object(announcement, peer)
        else:
            assert self._transport is not None
            announcement = self._transport.recv_object(0, "the announcement of the next batch")
        known = [number for number in announcement.numbers if number not in announcement.new]
        for number in known:
            self._structures.move_to_end(number)
        self._forget(keep=len(known))
        for number, (key, layout) in announcement.new.items():
            self._structures[number] = Structure(key, number)
            self._by_key[key] = number
            self._layouts[number] = layout
        return announcement, tensors

    def _states(self, work: Work, announcement: Announcement, structures: list[Structure]) -> list[Microbatch]:
        total = sum(announcement.sizes)
        even = len(set(announcement.sizes)) == 1
        return [
            Microbatch(
                index=index,
                structure=structure,
                layout=announcement.layouts.get(index, self._layouts[structure.number]),
                num_samples=announcement.sizes[index],
                weight=announcement.sizes[index] / total,
                num_microbatches=len(structures),
                even=even,
                seed=mix(work.seed, index),
            )
            for index, structure in enumerate(structures)
        ]

    def _describe(self, kind: Hashable, microbatches: list[Any]) -> tuple[Announcement, list[list[Tensor]]]:
        announcement = Announcement([], [], {}, {})
        sizes: list[int | None] = []
        all_tensors = []
        for index, microbatch in enumerate(microbatches):
            tensors, layout, shape_key = signature(microbatch)
            key = (kind, shape_key)
            number = self._by_key.get(key)
            if number is None:
                number = self._next_number
                self._next_number += 1
                announcement.new[number] = (key, layout)
                self._by_key[key] = number
                self._layouts[number] = layout
            elif not _same(layout, self._layouts[number]):
                announcement.layouts[index] = layout
            announcement.numbers.append(number)
            sizes.append(num_rows(tensors) or batch_size(microbatch))
            all_tensors.append(tensors)
        # Where a split of the user's leaves open how many samples there are, micro-batches count alike.
        announcement.sizes.extend(size if None not in sizes else 1 for size in sizes)  # type: ignore[misc]
        return announcement, all_tensors

    def _forget(self, *, keep: int) -> None:
        while len(self._structures) > max(MAX_STRUCTURES, keep):
            number, structure = self._structures.popitem(last=False)
            del self._by_key[structure.key], self._layouts[number]


def _same(layout: Layout, other: Layout) -> bool:
    try:
        return bool(layout == other)
    except (RuntimeError, ValueError):  # constants that compare elementwise, such as arrays
        return False
