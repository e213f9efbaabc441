"""Runs a step of the pipeline: delivers the batch, runs the user's step on every rank, executes the schedule.

A training step of two ranks with two micro-batches under 1F1B. Python is the user's step, run once for each micro-batch
on placeholders; F and B run generated code on data::

    rank 0   announce, deliver | Python 0  F0 send  Python 1  F1 send  recv B0  recv B1 | compare, gradients
    rank 1   announce, deliver | Python 0  recv F0 B0 send  Python 1  recv F1 B1 send   | compare, gradients

A micro-batch whose step unexpectedly reads a value leaves the schedule: once the micro-batches before it are done, it
runs event by event (`in_order`).
"""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.engine.ahead import EarlyForwards
from lightning_pipeline.engine.collectives import over_replicas
from lightning_pipeline.engine.delivery import Delivery
from lightning_pipeline.engine.draws import CountedDraws, Draws, set_aside
from lightning_pipeline.engine.ending import digest_of, end_step, wanted_values
from lightning_pipeline.engine.executor import RankProgram, ScheduleRun, Span
from lightning_pipeline.engine.expectations import Expectations
from lightning_pipeline.engine.gradient_hooks import hooks_of_parameters
from lightning_pipeline.engine.in_order import InOrder
from lightning_pipeline.engine.leaf_gradients import LeafGradients
from lightning_pipeline.engine.microbatch import Content, ContinuedStep, EarlyForward, Microbatch, StepResult, contents
from lightning_pipeline.engine.suspended import (
    BACKWARD,
    CLOSURE_ENDS,
    STEP_ENDS,
    BatchWork,
    MeetingOf,
    Parts,
    Suspended,
    SyncPoint,
)
from lightning_pipeline.engine.transfers import Transfer, Transfers
from lightning_pipeline.engine.visit import Visit
from lightning_pipeline.engine.work import LiveCount, StepTask
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.keyed_calls import KeyedCalls
from lightning_pipeline.recording.matcher import HookTensor
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.program import Program, average_in, needs_order
from lightning_pipeline.recording.provenance import Provenance, made_again
from lightning_pipeline.recording.recorder import Recorder
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.tensor_meta import EVERYWHERE_BYTES, conform
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.schedules import Kind, Schedule, forward_only, lower


class Pipeline:
    """Runs steps on this rank's virtual stages.

    Args:
        rank: this rank's place in the pipeline.
        placement: the rank of each virtual stage; the first one is on rank 0.
        tensors: parameters and buffers of the module.
        calls: tells which stage the running submodule belongs to.
        holders: gives the ranks that hold a tensor of the module, by number.
        schedule: makes the schedule of a training step on this placement, given the number of micro-batches.
        num_microbatches: micro-batches per step; a batch with fewer samples is split into fewer.
        on_module_changed: called if the module's tensors are not those of the last step.
    """

    def __init__(
        self,
        *,
        rank: int,
        placement: Sequence[int],
        device: torch.device,
        transport: Transport | None,
        tensors: ModuleTensors,
        calls: KeyedCalls,
        holders: Callable[[int], Sequence[int]],
        schedule: Callable[[int], Schedule],
        num_microbatches: int,
        on_module_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.placement = tuple(placement)
        self.num_ranks = max(placement) + 1
        self.num_virtual_stages = len(placement) // self.num_ranks
        self.last_rank = placement[-1]
        self.num_microbatches = num_microbatches
        self.observe: Callable[[Span], None] | None = None
        """Called with every action of a step and its start and end."""
        self.learning = False
        """Whether the last step ran a program that had not been seen before."""
        self.peak_live = 0
        """The largest number of virtual stages' activations alive on this rank at one time in the last step."""
        self.stages = [stage for stage, place in enumerate(placement) if place == rank]
        """This rank's virtual stages, ascending."""
        self.recorder = Recorder(tensors, calls, self.placement)
        self.recorder.warns = rank == 0
        self._tensors = tensors
        self._holders = holders
        self._device = device
        self._transport = transport
        self._direct = DirectTransport(transport, device) if transport is not None else None
        self._leaf_gradients: LeafGradients | None = None
        if transport is not None and self._direct is not None:
            self._leaf_gradients = LeafGradients(tensors, transport, self._direct)
        self._draws = Draws(device)
        self._schedule = schedule
        self._on_module_changed = on_module_changed
        self._programs: dict[tuple[bool, int], RankProgram] = {}
        self._delivery = Delivery(rank, self.num_ranks, transport)
        self._work: StepTask | None = None
        self._run: ScheduleRun | None = None
        self._microbatches: list[Microbatch] = []
        self._in_order: dict[int, InOrder] = {}
        self._live = LiveCount()
        self._uses: dict[str, set[int]] = {}
        self._unchecked: float | None = None
        self.reached: set[int] = set()
        """Virtual stages on which any event has run so far."""
        self._held: dict[Program, bool] = {}
        self._has_warned_of_reads = self._has_warned_of_averages = False
        self._warning: str | None = None  # issued after the step: the user's code may record warnings
        self._expectations = Expectations()
        self._ahead: EarlyForwards | None = None
        self._is_rest_in_order = False
        """Whether an expectation has failed, so that the remaining micro-batches of the step run in order."""

    def run(
        self,
        work: StepTask,
        microbatches: list[Any] | None,
        extra: Callable[[list[Microbatch]], Sequence[float]] = lambda states: (),
    ) -> tuple[list[Microbatch], list[list[float]]]:
        """Run one step.

        Args:
            microbatches: the micro-batches, on the first rank; None on the others, which receive them.
            extra: called after the micro-batches have run; its numbers are gathered on every rank.

        Returns:
            The micro-batches with their results, and every rank's numbers; no numbers if the ranks did not synchronize
            at the end of the step.
        """
        states, tensors = self._delivery.announce(work, microbatches)
        self._work, self._live, self._in_order = work, LiveCount(), {}
        self._microbatches = states
        self.learning = False
        self.recorder.recordings.clear()
        if self._tensors.refresh():
            self._on_module_changed()
            self.recorder.forget()
        if self.recorder.trim():
            self._held.clear()
        self._expectations.keep(self.recorder.num_events)
        self.recorder.has_hooks = self.num_ranks > 1 and bool(hooks_of_parameters(self._tensors))
        self._delivery.deliver(states, tensors)
        if self._leaf_gradients is not None:
            self._leaf_gradients.begin()
        with _no_collection():
            if work.batch is not None:
                self._run_in_parts(work, work.batch, states)
            with self._around():
                if self.num_ranks == 1:
                    if work.batch is None:
                        self._run_alone(work, states)
                    numbers = [list(extra(states))]
                else:
                    if work.batch is None:
                        self._run_in_stages(work, states)
                    numbers = self._end(work, states, extra(states))
                    self._delivery.write_back(states)
                    _set_retained(states)
                    self._share_leaf_gradients(work, states)
        for state in states:
            if state.recording is not None:
                state.recording.let_go()
        if self._warning is not None:
            warnings.warn(self._warning, stacklevel=2)
            self._warning = None
        self.peak_live = self._live.peak
        self._run, self._microbatches, self._in_order, self._ahead = None, [], {}, None
        return states, numbers

    def check(self) -> None:
        """Check that ranks ran the same code in steps that ended without synchronization. All ranks must call it.

        Raises:
            RuntimeError: they ran different code.
        """
        if self._unchecked is not None:
            assert self._transport is not None
            digest, self._unchecked = self._unchecked, None
            told = [self._transport.broadcast_object(digest, rank, "what ran") for rank in range(self.num_ranks)]
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
            self._programs[key] = RankProgram(lower(schedule)[self.rank])
        return self._programs[key]

    def take_uses(self) -> dict[str, set[int]]:
        """The virtual stages that have used each tensor of the module, by name, since the last call."""
        uses, self._uses = self._uses, {}
        return uses

    def note_release(self) -> None:
        """Forget what depends on which rank holds which tensor, as that has changed."""
        self._held.clear()
        self._expectations.forget()

    # -- reads by recordings ----------------------------------------------------------------------------------------

    def read(self, recording: Recording, values: Sequence[int]) -> list[Tensor]:
        """The data of values of a micro-batch whose step is running, on every rank."""
        state = next(one for one in self._microbatches if one.recording is recording)
        is_earlier = recording is not self.recorder.current
        with set_aside():  # the user's modes and autocast must not affect what runs here
            if self._ahead is not None and state.is_open and not is_earlier:
                found = self._ahead.values(state, recording, values)
                if found is not None:
                    return found
            self._warn_of_reads()
            if is_earlier and (state.is_done or state.program is not None):
                if not state.is_done:
                    assert self._run is not None
                    self._run.go_on(below=state.index + 1)
                return [self._spread_kept(state, value) for value in values]
            run = self._begin_in_order(state)
            if not state.is_done:
                run.run_up_to(recording.event)
            return run.data_of(values)

    def _warn_of_reads(self) -> None:
        """Warn once that reading values in training_step makes stages wait for one another."""
        assert self._work is not None
        if self._has_warned_of_reads or self._work.loss_of is None or len(self._microbatches) == 1:
            return
        if not self._expectations.has_given_up(self._beginning(self._microbatches[0])):
            return
        self._has_warned_of_reads = True
        if self.rank == 0:
            self._warning = (
                f"the training step reads what a stage computes ({users_line()}) and goes on differently each time, "
                f"or prints it, so each micro-batch waits for the one before, and stages do not work at the same time. "
                f"The result is the same; where speed matters, keep or log the tensor, and read it in "
                f"on_train_batch_end"
            )

    def _spread_kept(self, state: Microbatch, value: int) -> Tensor:
        """A value of an earlier micro-batch, on every rank."""
        assert state.recording is not None and self._direct is not None
        program = state.recording.event.program
        assert program is not None
        owner = self.placement[program.homes[value] % len(self.placement)]
        return self._direct.spread(state.kept.get(value), program.specs[value], owner)

    def read_held(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The data, on every rank, of tensors that only some ranks hold."""
        with set_aside():
            known = self._ahead.values_of_module(tensors) if self._ahead is not None else None
            if known is not None:
                return known
            return self._spread_module_tensors(tensors)

    def finish_before(self, recording: Recording, *, with_own: bool) -> None:
        """Finish the earlier micro-batches.

        Args:
            with_own: run the recording's own events so far, too.
        """
        state = next(one for one in self._microbatches if one.recording is recording)
        assert self._run is not None
        with set_aside():
            if with_own:
                self._begin_in_order(state).run_up_to(recording.event)
            else:
                self._run.go_on(below=state.index)

    def shown(self, recording: Recording, value: int, show: Callable[[Tensor], str]) -> str:
        """What `show` returns for a value or a tensor of the module, whose `grad_fn` only one rank has."""
        state = next(one for one in self._microbatches if one.recording is recording)
        with set_aside():
            run = self._begin_in_order(state)
            run.run_up_to(recording.event)
            if value < 0:
                owner, tensor = self._holders(-1 - value)[0], self._tensors.tensors[-1 - value]
            else:
                owner, tensor = self.placement[run.homes[value] % len(self.placement)], run.value(value)  # type: ignore[assignment]
            if owner != self.rank:
                return self._direct.hear(owner, "the text of a tensor")  # type: ignore[union-attr]
            text = show(tensor)
            if self._direct is not None:
                self._direct.tell(text)
            return text

    # -- details ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Entered around everything that micro-batches run."""
        installed = self.recorder.installed() if self.num_ranks > 1 else nullcontext()
        with self._draws.kept(), installed, over_replicas(self._topology):
            yield

    @property
    def _topology(self) -> Topology | None:
        return None if self._transport is None else self._transport.topology

    def _run_in_parts(self, work: StepTask, batch: BatchWork, states: list[Microbatch]) -> None:
        """Run a hand-optimized step, whose micro-batches synchronize where the batch does something once."""
        is_alone = self.num_ranks == 1
        made = [self._alone_in_parts(work, state) if is_alone else self._in_parts(work, state) for state in states]
        parts = Parts(
            states,
            [step for step, _ in made],
            batch,
            around=self._around,
            resumed=lambda state: made[state.index][1](),
            run=partial(self._run_part_alone if is_alone else self._run_part, work),
        )
        parts.run()

    def _alone_in_parts(
        self, work: StepTask, state: Microbatch
    ) -> tuple[Suspended, Callable[[], AbstractContextManager[None]]]:
        counted = CountedDraws(self._draws, state.seed)
        batch = tree.rebuild(state.layout, state.structure.joined(state.everywhere, state.given))

        def run() -> None:
            with counted:
                state.result, _ = work.step(state, batch)

        return Suspended(run, lambda meeting: None, self._device), counted.resumed

    def _run_part_alone(self, work: StepTask, meeting_of: MeetingOf) -> None:
        for state in self._microbatches:
            meeting = meeting_of(state)
            if meeting.what == BACKWARD:
                assert meeting.loss is not None and work.loss_of is not None
                given = {"retain_graph": True} if meeting.retain_graph else {}
                work.run_backward(work.loss_of(state, meeting.loss), **given)
                for stage in self.stages:
                    work.after_backward(stage, state)
            if meeting.loss is not None:
                meeting.loss = meeting.loss.detach()
            if meeting.what == STEP_ENDS:
                state.result = tree.replace(state.result, Tensor.detach)

    def _in_parts(
        self, work: StepTask, state: Microbatch
    ) -> tuple[Suspended, Callable[[], AbstractContextManager[None]]]:
        recording, batch = self._begin_recording(state, work)

        def run() -> None:
            with recording.entered():
                result, _ = work.step(state, batch)
                state.result = tree.replace(result, self._own)

        def note(meeting: SyncPoint) -> None:
            meeting.value = recording.meet(meeting.what, meeting.loss)

        return Suspended(run, note, self._device), recording.resumed

    def _run_part(self, work: StepTask, meeting_of: MeetingOf) -> None:
        """Run all micro-batches up to their next synchronization point."""
        states = self._microbatches
        self._in_order, self._run = {}, ScheduleRun(RankProgram([]), {})
        for state in states:
            state.program, state.loss_value, state.loss_tensor, state.asked = None, -1, None, ()
            state.inside, state.is_done = {}, False
        planned = 0

        def plan(state: Microbatch) -> None:
            nonlocal planned
            while planned <= state.index:
                planned += 1
                one = states[planned - 1]
                self._plan_part(work, one, meeting_of(one), is_scheduled=not states[0].is_done)

        plan(states[0])
        if not states[0].is_done:
            is_backward = meeting_of(states[0]).what == BACKWARD
            self._go_through(self.program(training=is_backward, num_microbatches=len(states)), plan)
        plan(states[-1])
        for state in states:
            self._end_part(state, meeting_of(state))
        self._live.now = 0

    def _plan_part(self, work: StepTask, state: Microbatch, meeting: SyncPoint, *, is_scheduled: bool) -> None:
        """Decide how a micro-batch runs up to a synchronization point: by the schedule, or in order right now.

        Args:
            is_scheduled: whether the micro-batches before it run by the schedule.
        """
        recording = state.recording
        assert recording is not None
        is_new = recording.event.program is None
        program = self._program_of(state, recording)
        state.loss_value = meeting.value
        ends = meeting.what == STEP_ENDS
        if ends:
            state.contents = self._contents_of(recording)
            state.places = {place.value: place for place in recording.take_alive()}
        in_use = set(state.places) if ends else recording.values_in_use()
        state.in_use = in_use
        part = self._part_of(state, recording) if not is_new else None
        is_simple = (
            part is not None
            and (is_scheduled or not (part.has_events or meeting.what == BACKWARD))
            and recording.is_simple
            and state.index not in self._in_order
            and not meeting.retain_graph
            and not (part.needs_order or part.comes_back or part.writes_again or part.carries_gradients)
            and len(part.visits) <= len(self.placement)
            and (meeting.value < 0 or (meeting.value in part.homes and meeting.value not in part.carried))
            and self._is_held(part)
        )
        if is_simple:
            assert part is not None
            own = [value for value in in_use | {meeting.value} if value in part.homes]
            state.program = part
            state.asked = tuple(sorted(v for v in own if v not in part.carried and v >= part.num_given))
            if state.carried is None:
                transfers = Transfers(state.index, self.placement, self.rank, self._direct, training=True)
                state.carried = ContinuedStep(recording.event, program, transfers)
            state.carried.crossing = part.crossing(state.asked)
            state.is_done = not part.has_events and meeting.what != BACKWARD
            return
        run = self._begin_in_order(state)
        run.run_up_to(recording.event)
        if meeting.what == BACKWARD:
            run.backward(program, work, retain_graph=meeting.retain_graph)
        for value in in_use | {meeting.value}:
            tensor = run.value(value) if value in run.homes and value >= len(state.structure.large) else None
            if tensor is not None and not tensor.is_meta:
                state.kept[value] = tensor.detach()
        state.carried = run.carry_on(recording.event, program, in_use)
        state.is_done = True

    def _part_of(self, state: Microbatch, recording: Recording) -> Program:
        """The program of the events recorded since the last synchronization point."""
        event = recording.event
        if event.as_part is None:
            before = state.carried.program if state.carried is not None else None
            event.as_part = Program(event, state.structure.large, before, len(self.placement))
            event.as_part.needs_order = needs_order(event.as_part.events, len(self.placement))
        return event.as_part

    def _end_part(self, state: Microbatch, meeting: SyncPoint) -> None:
        """Keep what the next part of a micro-batch needs, and share the loss where it is needed."""
        recording, carried = state.recording, state.carried
        assert recording is not None and carried is not None
        program = recording.event.program
        if state.program is not None:
            self._take_crossing(state, state.program, carried)
            carried.event, carried.program = recording.event, program
            carried.here = {key: tensor for key, tensor in carried.here.items() if key[1] in state.in_use}
        state.program = None
        assert self._work is not None and self._work.batch is not None
        needs_loss = meeting.what == CLOSURE_ENDS or (meeting.what == BACKWARD and self._work.batch.needs_losses)
        if needs_loss and meeting.value >= 0:
            assert self._direct is not None
            [spec, visit] = program.specs[meeting.value], program.homes[meeting.value]
            owner = self.placement[visit % len(self.placement)]
            meeting.loss = self._direct.spread(state.kept.get(meeting.value), spec, owner)
        state.kept = {value: tensor for value, tensor in state.kept.items() if value in state.in_use}
        if meeting.what == STEP_ENDS:
            state.carried = None

    def _take_crossing(self, state: Microbatch, part: Program, carried: ContinuedStep) -> None:
        """Register the transfers of a part through which a later part's gradients may flow back."""
        gone = part.with_gradients(state.loss_value) if state.loss_value in part.homes else frozenset()
        for visit, strand in carried.crossing:
            transfer = Transfer(strand.value, part.begins + visit - 1, part.begins + visit)
            transfer.is_gone = strand.value in gone
            if self.placement[visit - 1] == self.rank:
                transfer.sent = state.on(visit - 1).kept_edges[strand]
            if self.placement[visit] == self.rank:
                transfer.arrive(state.on(visit).kept_leaves[strand])
            carried.transfers.add(transfer)
        carried.crossing = []

    def _run_alone(self, work: StepTask, states: list[Microbatch]) -> None:
        """Run the user's steps directly, without recording, where the pipeline has one rank."""
        program = self.program(training=work.loss_of is not None, num_microbatches=len(states))
        for state in states:
            began = time.perf_counter()
            counted = CountedDraws(self._draws, state.seed)
            with counted.running():
                state.result, state.loss = work.step(
                    state, tree.rebuild(state.layout, state.structure.joined(state.everywhere, state.given))
                )
            self._live.add()
            began = self._tell_alone(state, began, program, is_forward=True)
            if work.loss_of is not None:
                if state.loss is not None:
                    loss, state.loss = state.loss, state.loss.detach()
                    self._draws.seed(state.seed, counted.number)  # hooks in backward may draw random numbers
                    work.run_backward(work.loss_of(state, loss))
                    del loss
                for stage in self.stages:
                    work.after_backward(stage, state)
                self._tell_alone(state, began, program, is_forward=False)
            self._live.now -= 1
            state.result = tree.replace(state.result, Tensor.detach)

    def _tell_alone(self, state: Microbatch, began: float, program: RankProgram, *, is_forward: bool) -> float:
        """Report actions that ran as one call: the first is given all of the time. Returns the current time."""
        now = time.perf_counter()
        if self.observe is not None:
            for action in program.actions:
                if action.microbatch == state.index and (action.kind is Kind.F) is is_forward:
                    self.observe((action, began, now))
                    began = now
        return now

    def _run_in_stages(self, work: StepTask, states: list[Microbatch]) -> None:
        program = self.program(training=work.loss_of is not None, num_microbatches=len(states))
        self._is_rest_in_order = False
        self._ahead = self._look_ahead(states)
        self._go_through(program, self._record, prepare=self._record_ahead if self._ahead is None else None)
        self._record(states[-1])

    def _go_through(
        self, program: RankProgram, record: Callable[[Microbatch], None], prepare: Callable[[int], None] | None = None
    ) -> None:
        """Run a schedule.

        Args:
            record: runs the Python of a micro-batch's step, unless that has been done.
            prepare: the same, called while the rank would otherwise wait; None for never.
        """
        assert self._work is not None
        visits = {
            stage: Visit(
                stage,
                self.placement,
                transport=self._transport,
                microbatches=self._microbatches,
                record=record,
                tensors=self._tensors.tensors,
                seed_draw=self._draws.seed,
                work=self._work,
                live=self._live,
                ahead=self._ahead,
            )
            for stage in self.stages
        }
        for stage in visits:
            if stage + 1 in visits:
                visits[stage].following, visits[stage + 1].preceding = visits[stage + 1], visits[stage]
        before_backward = self._before_backward if self._ahead is not None else None
        self._run = ScheduleRun(program, visits, self.observe, before_backward, prepare)
        self._run.go_on()
        for visit in visits.values():
            visit.following = visit.preceding = None  # break the reference cycles, which keep tensors alive

    def _record(self, state: Microbatch) -> None:
        """Run the user's step on this and earlier micro-batches that have not been recorded."""
        for one in self._microbatches[: state.index + 1]:
            if one.recording is None:
                self._record_one(one)

    def _record_ahead(self, microbatch: int) -> None:
        """Run the user's step while this rank would wait, which also lets receives be posted sooner."""
        self._record(self._microbatches[min(microbatch, len(self._microbatches) - 1)])

    def _before_backward(self, microbatch: int) -> None:
        """Run the Python of a micro-batch that ran forward early: only its end tells whether it may run backward."""
        state = self._microbatches[microbatch]
        if state.is_open and not state.is_passed_over:
            self._record(state)

    def _look_ahead(self, states: list[Microbatch]) -> EarlyForwards | None:
        """Prepare to run the forwards before the Python, if steps like this one have read values; else return None."""
        expected = []
        for state in states:
            expectation = None if self.recorder.has_hooks else self._expectations.of(self._beginning(state))
            if expectation is None:
                return None
            try:
                captured = made_again(expectation.origins, state.everywhere, partial(self._draws.seed, state.seed))
            except Exception:  # if it is real, the step's own Python raises it, perhaps inside a try block
                return None
            expected.append(EarlyForward(expectation, captured))
        for state, ahead in zip(states, expected, strict=True):
            state.ahead, state.program = ahead, ahead.expectation.program
            state.loss_value, state.asked = ahead.expectation.loss_value, ahead.expectation.asked
        return EarlyForwards(
            states,
            self.placement,
            self.rank,
            self._transport,
            self._tensors,
            self._device,
            read_module=self._spread_module_tensors,
        )

    def _beginning(self, state: Microbatch) -> Event:
        """The event at which the paths of this kind of micro-batch begin."""
        assert self._work is not None
        return self.recorder.beginning((self._work.kind, state.structure.key), len(state.structure.large))

    def _begin_recording(self, state: Microbatch, work: StepTask) -> tuple[Recording, Any]:
        """Begin a micro-batch's recording. Returns it, and the batch with placeholders to pass to the step."""
        structure = state.structure
        if work.loss_of is not None and any(spec.requires_grad for spec in structure.specs):
            raise NotImplementedError(
                "a tensor of the batch requires a gradient before the step, of which ranks would have parts: call "
                "requires_grad_() on it in training_step"
            )
        beginning = self._beginning(state)
        seed = state.seed  # capturing the state would make a reference cycle through its recording
        recording = Recording(self.recorder, beginning, self, lambda number: self._draws.seed(seed, number))
        state.recording = recording
        delivered = state.everywhere
        places = [
            recording.placeholder_for(number, spec, "a tensor of the batch")
            for number, spec in enumerate(structure.large)
        ]
        batch = tree.rebuild(state.layout, structure.joined(delivered, places))
        state.everywhere = []
        recording.note_batch(delivered)
        recording.delivered = delivered
        recording.batch_places = [weakref.ref(place) for place in places]
        if self._expectations.wants(beginning):
            recording.provenance = Provenance(delivered)
        return recording, batch

    def _record_one(self, state: Microbatch) -> None:
        work = self._work
        assert work is not None
        recording, batch = self._begin_recording(state, work)
        with recording.running():
            result, state.loss = work.step(state, batch)
            state.result = tree.replace(result, self._own)
        del batch
        if work.results_on is not None:
            # Drop the placeholders: values that only the result refers to need not be sent to every rank.
            state.result = StepResult.of(state.result, recording)
        del result
        state.contents = self._contents_of(recording)
        self._end_recording(state, recording, work)

    @staticmethod
    def _contents_of(recording: Recording) -> Content:
        """What to compare between ranks of a recording's captures.

        Delivered tensors are equal on all ranks and are left out, unless the step has modified them.
        """
        delivered, recording.delivered = recording.delivered, []
        alike = {id(tensor) for tensor in delivered if tensor.is_inference() or not tensor._version}
        return [*contents(recording.captured, alike | recording.overwritten), *recording.seeds]

    def _program_of(self, state: Microbatch, recording: Recording) -> Program:
        """The program of a recording's path so far, built on first use."""
        program = recording.event.program
        if program is None:
            program = recording.event.program = Program(recording.event, state.structure.large)
            program.needs_order = needs_order(program.events, len(self.placement))
            self._note_uses(program)
            self._warn_of_averages(program)
            self.learning = True
        return program

    def _warn_of_averages(self, program: Program) -> None:
        """Warn once that a moving average in training_step is updated once per micro-batch."""
        assert self._work is not None
        if self._has_warned_of_averages or self._work.loss_of is None or len(self._microbatches) == 1:
            return
        average = average_in(program.events, self._tensors.tensors)
        if average is None:
            return
        self._has_warned_of_averages = True
        if self.rank == 0:
            names = self._tensors.names
            self._warning = (
                f"{names[average.target][0]} takes in {names[average.source][0]} in training_step ({average.line}), "
                f"which runs for each of {len(self._microbatches)} micro-batches: what is meant once a batch, as a "
                f"moving average is, belongs in on_train_batch_end"
            )

    def _end(self, work: StepTask, states: list[Microbatch], extra: Sequence[float]) -> list[list[float]]:
        assert self._transport is not None
        wanted = wanted_values(states, self._owners(states))
        if work.results_on is not None and not work.waits and not wanted and not self.learning:
            self._unchecked = digest_of(states, wanted, self._unchecked)
            self._give_results(states, work.results_on)
            return []
        numbers = end_step(states, wanted, self._transport, self._direct, self.rank, extra)
        if work.results_on is not None:
            self._give_results(states, work.results_on)
        self._transport.flush()
        return numbers

    def _share_leaf_gradients(self, work: StepTask, states: list[Microbatch]) -> None:
        captured = []
        for state in states:
            assert state.recording is not None
            places = state.recording.event.program.leaves if work.loss_of is not None else ()
            captured += [state.recording.captured[place] for place in places]
        if self._leaf_gradients is not None:
            self._leaf_gradients.share(captured)

    def _own(self, tensor: Tensor) -> Tensor:
        """A tensor that a step returns; the module's own are detached into a value, as this rank may not hold them."""
        is_held = self._tensors.number_of(tensor) is not None or holders_of(tensor) is not None
        return tensor.detach() if is_held else tensor

    def _give_results(self, states: Sequence[Microbatch], rank: int) -> None:
        """Send the results of the steps to a rank."""
        assert self._direct is not None
        for state in states:
            found: dict[int, Tensor] = {}
            for value, spec in state.result.values().items():
                owner = self._owner(state, value)
                if owner == self.rank:
                    own = state.kept[value]
                    if rank == self.rank:
                        found[value] = own
                    else:
                        self._direct.send(conform(own, spec), rank)
                elif self.rank == rank:
                    found[value] = self._direct.receive(spec, owner)
            state.result = state.result.on(found) if self.rank == rank else None

    def _end_recording(self, state: Microbatch, recording: Recording, work: StepTask) -> None:
        value = recording.value_of(state.loss)
        loss_value = -1 if value is None else value
        state.places = {place.value: place for place in recording.take_alive()}
        returned = state.result.values() if isinstance(state.result, StepResult) else ()
        asked = tuple(dict.fromkeys([*state.places, *returned, *([value] if value is not None else [])]))
        if self._ahead is not None and self._ahead.has_ended(state, recording, loss_value, asked):
            self._expectations.note_hit(self._beginning(state))
            return
        program = self._program_of(state, recording)
        is_simple = recording.is_simple and not program.needs_order and len(program.visits) <= len(self.placement)
        is_simple = is_simple and not program.comes_back and not program.writes_again and self._is_held(program)
        has_read = bool(recording.reads or recording.module_reads)
        if is_simple and not has_read and not state.is_open and not self._is_rest_in_order:
            state.program, state.loss_value, state.asked = program, loss_value, asked
            return
        run = self._begin_in_order(state)
        if has_read:
            self._expectations.learn(
                self._beginning(state), recording, program, can_run_ahead=is_simple, loss_value=loss_value, asked=asked
            )
        state.loss_value = loss_value
        run.run_up_to(recording.event)
        for number in asked:
            tensor = run.value(number)
            if tensor is not None and run.homes[number] >= 0:
                state.kept[number] = tensor.detach()
        state.kept = {n: t for n, t in state.kept.items() if not t.is_meta}
        if work.loss_of is not None and value is not None:
            run.backward(program, work)
        elif work.loss_of is not None:
            for stage in self.stages:
                work.after_backward(stage, state)
        run.let_go()
        state.is_done = True

    def _note_uses(self, program: Program) -> None:
        for event in program.events:
            self.reached.add(event.visit % len(self.placement))
            for value in event.inputs:
                if type(value) is int and value < 0 and not self._stays_everywhere(-1 - value):
                    self._tensors.holders[-1 - value].add(event.visit % len(self.placement))
                    for name in self._tensors.names[-1 - value]:
                        self._uses.setdefault(name, set()).add(event.visit % len(self.placement))

    def _stays_everywhere(self, number: int) -> bool:
        """Whether all ranks keep a buffer whichever of them uses it: all compute with small replicated ones."""
        is_small = TensorSpec.of(self._tensors.tensors[number]).num_bytes <= EVERYWHERE_BYTES
        return is_small and self._tensors.is_replicated(number)

    def _is_held(self, program: Program) -> bool:
        """Whether every event runs on a rank that holds the module's tensors that it uses."""
        found = self._held.get(program)
        if found is None:
            found = self._held[program] = all(
                self.placement[event.visit % len(self.placement)]
                in (value.ranks if isinstance(value, HookTensor) else self._holders(-1 - value))
                for event in program.events
                for value in event.inputs
                if isinstance(value, HookTensor) or (type(value) is int and value < 0)
            )
        return found

    def _begin_in_order(self, state: Microbatch) -> InOrder:
        """Finish the micro-batches before this one, then switch it to running event by event."""
        run = self._in_order.get(state.index)
        if run is None:
            assert self._run is not None and self._work is not None
            if self._ahead is not None and state.is_open:
                self._expectations.note_miss(self._beginning(state))
                self._ahead.pass_over(state, self._run.go_on, self._live)
                self._is_rest_in_order = True
            self._run.go_on(below=state.index)
            run = self._in_order[state.index] = InOrder(
                state,
                state.structure.large,
                self.placement,
                self.rank,
                self._tensors,
                self._direct,
                holders=self._holders,
                seed_draw=self._draws.seed,
                training=self._work.loss_of is not None,
                earlier=self._spread_kept_of,
            )
        return run

    def _spread_module_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The data of tensors of the module, on every rank."""
        assert self._direct is not None
        found = []
        for tensor in tensors:
            number = self._tensors.number_of(tensor)
            owner = (self._holders(number) if number is not None else holders_of(tensor) or (0,))[0]
            own = tensor.detach() if owner == self.rank else None
            found.append(self._direct.spread(own, TensorSpec.of(tensor), owner))
        return found

    def _spread_kept_of(self, recording: Recording, value: int) -> Tensor:
        return self._spread_kept(next(one for one in self._microbatches if one.recording is recording), value)

    def _owners(self, states: Sequence[Microbatch]) -> dict[int, dict[int, int]]:
        """For each micro-batch, the rank that computed each value that the user's code still refers to."""
        return {state.index: {value: self._owner(state, value) for value in state.places} for state in states}

    def _owner(self, state: Microbatch, value: int) -> int:
        assert state.recording is not None
        program = state.program or state.recording.event.program
        assert program is not None
        return self.placement[program.homes[value] % len(self.placement)]


def _set_retained(states: Sequence[Microbatch]) -> None:
    """Set ``.grad`` of the tensors on which `retain_grad` was called."""
    for state in states:
        for place, gradient in state.gradients:
            if type(place) is not Placeholder and gradient is not None:
                place.grad = gradient


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
