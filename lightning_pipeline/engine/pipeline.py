"""Runs steps of the pipeline on this rank: delivers the batch, runs the user's step, executes the schedule.

A training step of two ranks with two micro-batches under 1F1B. Python is the user's step, run once for each micro-batch
on placeholders; F and B run generated code on data::

    rank 0   announce, deliver | Python 0  F0 send  Python 1  F1 send  recv B0  recv B1 | compare, gradients
    rank 1   announce, deliver | Python 0  recv F0 B0 send  Python 1  recv F1 B1 send   | compare, gradients

A micro-batch whose step unexpectedly reads a value leaves the schedule: once the micro-batches before it are done, it
runs event by event (`in_order`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.engine.collectives import over_replicas
from lightning_pipeline.engine.delivery import Delivery
from lightning_pipeline.engine.executor import RankProgram, Span
from lightning_pipeline.engine.gradient_hooks import hooks_of_parameters
from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.one_rank import OneRankStep
from lightning_pipeline.engine.parts import StepParts
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.engine.reads import reads_failing
from lightning_pipeline.engine.replica_collectives import World
from lightning_pipeline.engine.step import PipelineStep
from lightning_pipeline.engine.suspended import BatchWork, Parts
from lightning_pipeline.engine.work import LiveCount, StepTask
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.memory import fill
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.program import Program
from lightning_pipeline.schedules import Schedule, forward_only, lower


class Pipeline:
    """Runs steps on this rank's virtual stages.

    Args:
        shared: this rank's. The first rank gets the data, whatever its stage.
        schedule: makes the schedule of a training step on this placement, given the number of micro-batches.
        num_microbatches: micro-batches per step; a batch with fewer samples is split into fewer.
        on_module_changed: called if the module's tensors are not those of the last step, with those that it lost.
        world: the replicas, which draw other random numbers each.
    """

    def __init__(
        self,
        shared: RankResources,
        *,
        schedule: Callable[[int], Schedule],
        num_microbatches: int,
        on_module_changed: Callable[[list[Tensor]], None] = lambda lost: None,
        world: World | None = None,
    ) -> None:
        self._shared = shared
        self.rank, self.placement = shared.rank, shared.placement
        self.num_ranks = max(self.placement) + 1
        self.num_virtual_stages = len(self.placement) // self.num_ranks
        self.last_rank = self.placement[-1]
        self.num_microbatches = num_microbatches
        self.observe: Callable[[Span], None] | None = None
        """Called with every action of a step and its start and end."""
        self.peak_live: float = 0
        """The largest number of virtual stages' activations alive on this rank at one time in the last step."""
        self.ran: list[tuple[Program | None, int]] = []
        """Of each micro-batch of the last observed step: its program, if it had one, and the number of its loss."""
        self.stages, self.recorder, self.offload = shared.stages, shared.recorder, shared.offload
        self._world = world
        self.recorder.has_replicas = has_replicas = world is not None and world.size > 1
        shared.draws.replicated = shared.tensors if has_replicas else None
        self.reached = shared.reached
        """Virtual stages on which any event has run so far."""
        self._schedule = schedule
        self._on_module_changed = on_module_changed
        self._programs: dict[tuple[bool, int], RankProgram] = {}
        self._delivery = Delivery(self.rank, self.placement, shared.transport)
        self._unchecked: float | None = None

    @property
    def learning(self) -> bool:
        """Whether the last step ran a program that had not been seen before."""
        return self._shared.has_learned

    def run(
        self,
        work: StepTask,
        microbatches: list[Any] | None,
        extra: Callable[[list[Microbatch]], Sequence[float]] = lambda states: (),
    ) -> tuple[list[Microbatch], list[list[float]]]:
        """Run one step.

        Args:
            extra: called after the micro-batches have run; its numbers are gathered on every rank.

        Returns:
            The micro-batches with their results, and every rank's numbers; no numbers if the ranks did not synchronize
            at the end of the step.
        """
        states, tensors = self._delivery.announce(work, microbatches)
        shared, live = self._shared, LiveCount()
        self._note_module()
        self._delivery.deliver(states, tensors)
        if shared.leaf_gradients is not None:
            shared.leaf_gradients.begin()
        with _no_collection():
            if self.num_ranks == 1:
                numbers = self._run_alone(OneRankStep(shared, work, states, live, self.observe), work, states, extra)
            else:
                with reads_failing():
                    numbers = self._run_in_stages(PipelineStep(shared, work, states, live, self.observe), extra)
        shared.warnings.issue()
        self.peak_live = live.peak
        if self.observe is not None:
            self.ran = [(state.program, state.loss_value) for state in states]
        return states, numbers

    def share_batch(self, batch: Any) -> None:
        """Put what the last step has written into its batch into this rank's copy of it. All ranks must call it.

        Args:
            batch: the whole batch; on every rank, with the same structure.
        """
        direct = self._shared.direct
        if direct is None:
            return
        if self.rank == 0:
            direct.tell(self._delivery.has_written)
            has_written = self._delivery.has_written
        else:
            has_written = direct.hear(0, "whether a step has written into its batch")
        for tensor in tree.leaves(batch) if has_written else ():
            with torch.no_grad():
                data = direct.spread(None if self.rank else tensor, TensorSpec.of(tensor), 0)
                if self.rank and tensor.layout is torch.strided:
                    fill(tensor, data)
                elif self.rank:
                    tensor.copy_(data)

    def check(self) -> None:
        """Check that ranks ran the same code in steps that ended without synchronization. All ranks must call it.

        Raises:
            RuntimeError: they ran different code.
        """
        if self._unchecked is not None:
            transport = self._shared.transport
            assert transport is not None
            digest, self._unchecked = self._unchecked, None
            told = [transport.broadcast_object(digest, rank, "what ran") for rank in range(self.num_ranks)]
            if len(set(told)) > 1:
                raise RuntimeError(
                    "the ranks did not run the same code in steps whose outputs stay on the last stage: every rank "
                    "runs the whole step, and has to come to the same; output_broadcast=True finds the first difference"
                )

    def use(self, schedule: Callable[[int], Schedule]) -> None:
        """Replace the schedule of training steps, keeping the placement. All ranks must call it."""
        if schedule is not self._schedule:
            self._schedule = schedule
            self._programs = {key: program for key, program in self._programs.items() if not key[0]}

    def program(self, *, training: bool, num_microbatches: int) -> RankProgram:
        """This rank's actions in a step, including sends and receives."""
        key = (training, num_microbatches)
        if key not in self._programs:
            if training:
                schedule = self._schedule(num_microbatches)
            else:
                schedule = forward_only(self.num_ranks, num_microbatches, placement=self.placement)
            offload = self.offload.share if training and self.offload is not None and self.num_ranks > 1 else None
            self._programs[key] = RankProgram(lower(schedule)[self.rank], offload=offload)
        return self._programs[key]

    def take_uses(self) -> dict[str, set[int]]:
        """The virtual stages that have used each tensor of the module, by name, since the last call."""
        uses, self._shared.uses = self._shared.uses, {}
        return uses

    def note_release(self) -> None:
        """Forget what depends on which rank holds which tensor, as that has changed."""
        self._shared.forget_holders()
        self._shared.expectations.forget()

    def take_in(self) -> None:
        """Take in what hooks have put into the module. All ranks must call it."""
        lost = self._shared.tensors.refresh()
        if lost is not None:
            self._on_module_changed(lost)
            self.recorder.forget()

    def _note_module(self) -> None:
        """Bring what is known of the module up to date before a step."""
        shared, recorder = self._shared, self.recorder
        shared.has_learned = False
        recorder.recordings.clear()
        self.take_in()
        if recorder.trim():
            shared.forget_holders()
        shared.expectations.keep(recorder.num_events)
        recorder.has_hooks = self.num_ranks > 1 and bool(hooks_of_parameters(shared.tensors))

    def _run_alone(
        self,
        step: OneRankStep,
        work: StepTask,
        states: list[Microbatch],
        extra: Callable[[list[Microbatch]], Sequence[float]],
    ) -> list[list[float]]:
        if work.batch is not None:
            self._run_parts(step, work.batch, states)
        with self._around():
            if work.batch is None:
                step.run_micro_batches(self.program(training=work.loss_of is not None, num_microbatches=len(states)))
            return [list(extra(states))]

    def _run_in_stages(
        self, step: PipelineStep, extra: Callable[[list[Microbatch]], Sequence[float]]
    ) -> list[list[float]]:
        states, batch = step.states, step.work.batch

        def program(training: bool) -> RankProgram:
            return self.program(training=training, num_microbatches=len(states))

        if batch is not None:
            self._run_parts(StepParts(step, batch, program), batch, states)
        with self._around():
            if batch is None:
                step.run_micro_batches(program(step.work.loss_of is not None))
            self._delivery.note_written()
            numbers, self._unchecked = step.end(extra(states), self._unchecked)
            self._delivery.write_back(states)
            step.set_retained()
            step.share_leaf_gradients()
        step.let_go()
        return numbers

    def _run_parts(self, runner: OneRankStep | StepParts, batch: BatchWork, states: list[Microbatch]) -> None:
        """Run a hand-optimized step, whose micro-batches synchronize where the batch does something once."""
        made = [runner.suspended(state) for state in states]
        parts = Parts(
            states,
            [step for step, _ in made],
            batch,
            around=self._around,
            resumed=lambda state: made[state.index][1](),
            run=runner.run_part,
        )
        parts.run()

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Entered around everything that micro-batches run."""
        installed = self.recorder.installed() if self.num_ranks > 1 else nullcontext()
        with self._shared.draws.kept(), installed, over_replicas(self._world):
            yield


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection, so that placeholders die at the same point of the user's code on all ranks."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
