"""A step of the pipeline: the batch is delivered, the schedule runs, and what was new is settled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.microbatch import batch_size, signature
from lightning_pipeline.partition.random import mix
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.runtime.executor import Span, execute
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.stage import Stage
from lightning_pipeline.runtime.structure import Report, Structure
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.schedules import Action, build, forward_only, gpipe, lower, one_f_one_b

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


@dataclass(slots=True)
class Work:
    """What a step does with its micro-batches.

    Attributes:
        kind: which of the user's steps; structures of different kinds are kept apart.
        step: runs the step on one micro-batch.
        loss_of: the loss that backward starts from; None without backward.
        run_backward: runs backward from a loss.
        after_backward: called after each micro-batch's backward.
        seed: seed of the step; each micro-batch derives its own.
    """

    kind: Hashable
    step: Callable[[Microbatch, Any], Any]
    loss_of: Callable[[Microbatch, Any], Tensor] | None
    run_backward: Callable[[Tensor], None]
    after_backward: Callable[[], None]
    seed: int


@dataclass(slots=True)
class StepReport:
    """What a step came to on this stage."""

    microbatches: list[Microbatch]
    reports: dict[int, Report] = field(default_factory=dict)
    peak_live: int = 0
    training: bool = False


class Pipeline:
    """Runs steps on this rank's stage.

    Args:
        schedule: name of the schedule for training steps.
        num_microbatches: micro-batches a step; a batch of fewer samples makes fewer.
    """

    def __init__(
        self,
        *,
        stage: int,
        num_stages: int,
        device: torch.device,
        transport: Transport | None,
        interception: Interception,
        schedule: str,
        num_microbatches: int,
    ) -> None:
        self.stage = stage
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.interception = interception
        self.observe: Callable[[Span], None] | None = None
        self._device = device
        self._transport = transport
        self._schedule = schedule
        self._orders: dict[tuple[bool, int], list[Action]] = {}
        self._structures: OrderedDict[int, Structure] = OrderedDict()
        self._by_key: dict[Hashable, int] = {}
        self._layouts: dict[int, Layout] = {}
        self._next_number = 0
        self._templates: dict[Hashable, Structure] = {}
        self._known_leaves: set[str] = set()

    def run(self, work: Work, microbatches: list[Any] | None) -> StepReport:
        """Run one step. `microbatches` is the first stage's; the others receive theirs."""
        states = self._announce(work, microbatches)
        template = self._templates.get(work.kind)
        observing = not all(state.structure.fixed for state in states)
        stage = Stage(
            stage=self.stage,
            num_stages=self.num_stages,
            device=self._device,
            interception=self.interception,
            transport=self._transport,
            microbatches=states,
            step=work.step,
            loss_of=work.loss_of,
            run_backward=work.run_backward,
            after_backward=work.after_backward,
            template=template,
        )
        order = self.order(training=work.loss_of is not None, num_microbatches=len(states))
        with self.interception.streams.kept(), self.interception.installed(observing):
            stage.begin()
            execute(order, stage, self.observe)
        if self._transport is not None:
            self._transport.flush()
        return StepReport(states, stage.reports, stage.peak_live, training=work.loss_of is not None)

    def order(self, *, training: bool, num_microbatches: int) -> list[Action]:
        """This rank's actions, sends and receives included."""
        key = (training, num_microbatches)
        if key not in self._orders:
            if not training:
                schedule = forward_only(self.num_stages, num_microbatches)
            elif num_microbatches >= self.num_stages:
                schedule = build(self._schedule, self.num_stages, num_microbatches)
            else:  # a batch with too few samples for the schedule's rule
                schedule = (gpipe if self._schedule == "gpipe" else one_f_one_b)(self.num_stages, num_microbatches)
            self._orders[key] = list(lower(schedule))[self.stage]
        return self._orders[key]

    def is_new(self, report: StepReport) -> bool:
        """Whether this stage saw something in the step that the other stages have to know."""
        if any(not state.structure.settled for state in report.microbatches):
            return True
        return not self.interception.called <= self._known_leaves

    def own_reports(self, report: StepReport) -> dict[int, Report]:
        """This stage's reports by structure, an empty one where there was nothing to report."""
        numbers = sorted({state.structure.number for state in report.microbatches})
        reports = {number: report.reports.get(number, Report()) for number in numbers}
        reports[numbers[0]].leaves |= self.interception.called
        return reports

    def settle(self, report: StepReport, reports: list[dict[int, Report]]) -> None:
        """Take in every stage's reports on the step's new structures; all stages call it after the same step.

        Raises:
            ValueError: a stage ran no module, neither in this training step nor before.
        """
        numbers = sorted({state.structure.number for state in report.microbatches})
        if report.training:
            self._note_leaves([list(stage_reports.values()) for stage_reports in reports])
        for number in numbers:
            structure = self._structures[number]
            if structure.settled:
                continue
            structure.settle([stage_reports[number] for stage_reports in reports])
            if not structure.dynamic:
                self._templates[structure.key[0]] = structure  # type: ignore[index]
        self._known_leaves |= self.interception.called

    def _note_leaves(self, reports: list[list[Report]]) -> None:
        """Note which stage runs which leaf; `reports` by stage."""
        ran = [set().union(*(report.leaves for report in stage_reports)) for stage_reports in reports]
        for stage, names in enumerate(ran):
            if not names and stage > 0:
                passed = next((report.passed for report in reports[stage] if report.passed), "the step ended before")
                raise ValueError(
                    f"stage {stage} is never reached: {passed}, and no micro-batch of this training step called a "
                    f"module of stage {stage}; name the first module that runs there in stage_config"
                )
        for leaf in self.interception.leaves:
            stages = [stage for stage, names in enumerate(ran) if leaf.name in names]
            if stages and next(leaf.module.parameters(), None) is not None:
                leaf.seen = min(stages[0], leaf.seen if leaf.seen is not None else stages[0])

    # -- details ----------------------------------------------------------------------------------------------------

    def _announce(self, work: Work, microbatches: list[Any] | None) -> list[Microbatch]:
        what = "the announcement of the next batch"
        if self.stage == 0:
            assert microbatches is not None
            announcement, tensors = self._describe(work.kind, microbatches)
            for peer in range(1, self.num_stages):
                assert self._transport is not None
                self._transport.send_object(announcement, peer)
        else:
            assert self._transport is not None
            announcement, tensors = self._transport.recv_object(0, what), []
        for number, (key, layout) in announcement.new.items():
            self._add(number, key, layout)
        total = sum(announcement.sizes)
        even = len(set(announcement.sizes)) == 1
        states = []
        for index, number in enumerate(announcement.numbers):
            self._structures.move_to_end(number)
            states.append(
                Microbatch(
                    index=index,
                    structure=self._structures[number],
                    layout=announcement.layouts.get(index, self._layouts[number]),
                    num_samples=announcement.sizes[index],
                    weight=announcement.sizes[index] / total,
                    num_microbatches=len(announcement.sizes),
                    even=even,
                    seed=mix(work.seed, index),
                    tensors=tensors[index] if tensors else None,
                )
            )
        self._forget()
        return states

    def _describe(self, kind: Hashable, microbatches: list[Any]) -> tuple[Announcement, list[list[Tensor]]]:
        announcement = Announcement([], [], {}, {})
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
            announcement.sizes.append(batch_size(microbatch) or 1)
            all_tensors.append(tensors)
        return announcement, all_tensors

    def _add(self, number: int, key: Hashable, layout: Layout) -> None:
        self._structures[number] = Structure(key, number)
        self._by_key[key] = number
        self._layouts[number] = layout

    def _forget(self) -> None:
        while len(self._structures) > MAX_STRUCTURES:
            number, structure = self._structures.popitem(last=False)
            del self._by_key[structure.key], self._layouts[number]


def _same(layout: Layout, other: Layout) -> bool:
    try:
        return bool(layout == other)
    except (RuntimeError, ValueError):  # constants that compare elementwise, such as arrays
        return False

