"""Parts of hand-optimized steps on several ranks: what runs between two synchronization points of micro-batches.

Each part is a program of its own, which the schedule runs like a step where it can. Values that later parts use stay on
their ranks with their graphs, and gradients flow back to earlier parts through the transfers that were registered::

    part 1   F F F F        values and graphs stay      part 2   F F F F  B B B B     gradients reach part 1
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning_pipeline.engine.backward_in_order import run_backward
from lightning_pipeline.engine.executor import RankProgram, ScheduleRun
from lightning_pipeline.engine.microbatch import ContinuedStep, Microbatch
from lightning_pipeline.engine.step import PipelineStep, contents_of
from lightning_pipeline.engine.suspended import (
    BACKWARD,
    CLOSURE_ENDS,
    STEP_ENDS,
    BatchWork,
    MeetingOf,
    Suspended,
    SyncPoint,
    agree,
)
from lightning_pipeline.engine.transfers import Transfer, Transfers
from lightning_pipeline.partition import tree
from lightning_pipeline.recording.alive import take_alive, values_in_use
from lightning_pipeline.recording.kept_views import kept_views
from lightning_pipeline.recording.module_writes import needs_order
from lightning_pipeline.recording.own_changes import OwnChangesOnPath
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.python_again import run_again
from lightning_pipeline.recording.recording import Recording


class StepParts:
    """Runs the parts of a hand-optimized step.

    Args:
        batch: what the step does once for all micro-batches.
        program_of: gives the actions of a part; takes whether it ends in a backward.
    """

    def __init__(self, step: PipelineStep, batch: BatchWork, program_of: Callable[[bool], RankProgram]) -> None:
        self._step, self._batch, self._program_of = step, batch, program_of
        self._shared = step.shared

    def suspended(self, state: Microbatch) -> tuple[Suspended, Callable[[], AbstractContextManager[None]]]:
        """A micro-batch's step, and what to enter around each of its parts."""
        recording, batch = self._step.begin_recording(state)
        if len(self._step.states) > 1:
            recording.changes = OwnChangesOnPath(recording, agree, is_first=state.index == 0)

        def run() -> None:
            with recording.entered():
                result, _ = self._step.work.step(state, batch)
                state.result = tree.replace(result, self._step.detached)

        def note(meeting: SyncPoint) -> None:
            if meeting.what == BACKWARD:
                run_again(recording, meeting.loss, is_last=not meeting.retain_graph)
            meeting.value = recording.meet(meeting.what, meeting.loss)

        return Suspended(run, note, self._shared.device), recording.resumed

    def run_part(self, meeting_of: MeetingOf) -> None:
        """Run all micro-batches up to their next synchronization point."""
        step, states = self._step, self._step.states
        step.in_order, step.run = {}, ScheduleRun(RankProgram([]), {})
        for state in states:
            state.program, state.loss_value, state.loss_tensor, state.asked = None, -1, None, ()
            state.inside, state.is_done = {}, False
        num_planned = 0

        def plan(state: Microbatch) -> None:
            nonlocal num_planned
            while num_planned <= state.index:
                num_planned += 1
                one = states[num_planned - 1]
                self._plan(one, meeting_of(one), is_scheduled=not states[0].is_done)

        plan(states[0])
        if not states[0].is_done:
            step.go_through(self._program_of(meeting_of(states[0]).what == BACKWARD), plan)
        plan(states[-1])
        for state in states:
            self._end(state, meeting_of(state))
        step.live.now = 0

    def _plan(self, state: Microbatch, meeting: SyncPoint, *, is_scheduled: bool) -> None:
        """Decide how a micro-batch runs up to a synchronization point: by the schedule, or in order right now.

        Args:
            is_scheduled: whether the micro-batches before it run by the schedule.
        """
        recording = state.recording
        assert recording is not None
        is_new = recording.event.program is None
        program = self._shared.program_of(state, recording, self._step.work)
        state.loss_value = meeting.value
        ends = meeting.what == STEP_ENDS
        if ends:
            state.keep_written()
            state.contents = contents_of(recording)
            state.places = {place._pl_value: place for place in take_alive(recording)}
            recording.kept_views = kept_views(recording, [*state.places.values()])
        state.in_use = set(state.places) if ends else values_in_use(recording)
        part = None if is_new else self._part_of(state, recording)
        if part is not None and self._is_simple(part, state, meeting, is_scheduled=is_scheduled):
            own = [value for value in state.in_use | {meeting.value} if value in part.homes]
            state.program = part
            state.asked = tuple(sorted(v for v in own if v not in part.carried and v >= part.num_given))
            if state.carried is None:
                transfers = Transfers(state.index, self._shared, training=True)
                state.carried = ContinuedStep(recording.event, program, transfers)
            state.carried.crossing = part.crossing(state.asked)
            state.is_done = not part.has_events and meeting.what != BACKWARD
        else:
            self._run_in_order(state, recording, program, meeting)

    def _is_simple(self, part: Program, state: Microbatch, meeting: SyncPoint, *, is_scheduled: bool) -> bool:
        """Whether a part can run by the schedule."""
        assert state.recording is not None
        return (
            (is_scheduled or not (part.has_events or meeting.what == BACKWARD))
            and state.recording.is_simple
            and state.index not in self._step.in_order
            and not meeting.retain_graph
            and not (part.needs_order or part.comes_back or part.writes_again or part.carries_gradients)
            and len(part.visits) <= len(self._shared.placement)
            and (meeting.value < 0 or (meeting.value in part.homes and meeting.value not in part.carried))
            and self._shared.is_held(part)
        )

    def _run_in_order(self, state: Microbatch, recording: Recording, program: Program, meeting: SyncPoint) -> None:
        run = self._step.begin_in_order(state)
        run.run_up_to(recording.event)
        if meeting.what == BACKWARD:
            run_backward(run, program, self._step.work, retain_graph=meeting.retain_graph)
        for value in state.in_use | {meeting.value}:
            tensor = run.value(value) if value in run.homes and value >= len(state.structure.large) else None
            if tensor is not None and not tensor.is_meta:
                state.kept[value] = tensor.detach()
        state.carried = run.carry_on(recording.event, program, state.in_use)
        state.is_done = True

    def _part_of(self, state: Microbatch, recording: Recording) -> Program:
        """The program of the events recorded since the last synchronization point."""
        event = recording.event
        if event.as_part is None:
            before = state.carried.program if state.carried is not None else None
            stages, placement = len(self._shared.placement), self._shared.placement_of_gradients
            event.as_part = Program(event, state.structure.large, before, stages, placement)
            event.as_part.needs_order = needs_order(event.as_part.events, len(self._shared.placement))
        return event.as_part

    def _end(self, state: Microbatch, meeting: SyncPoint) -> None:
        """Keep what the next part of a micro-batch needs, and share the loss where it is needed."""
        recording, carried = state.recording, state.carried
        assert recording is not None and carried is not None
        program = recording.event.program
        assert program is not None
        if state.program is not None:
            self._take_crossing(state, state.program, carried)
            carried.event, carried.program = recording.event, program
            carried.here = {key: tensor for key, tensor in carried.here.items() if key[1] in state.in_use}
        state.program = None
        needs_loss = meeting.what == CLOSURE_ENDS or (meeting.what == BACKWARD and self._batch.needs_losses)
        if needs_loss and meeting.value >= 0:
            meeting.loss = self._shared.spread_kept(state, meeting.value)
        state.kept = {value: tensor for value, tensor in state.kept.items() if value in state.in_use}
        if meeting.what == STEP_ENDS:
            state.carried = None

    def _take_crossing(self, state: Microbatch, part: Program, carried: ContinuedStep) -> None:
        """Register the transfers of a part through which a later part's gradients may flow back."""
        is_backward = state.loss_value >= 0 and state.loss_value in part.homes  # below 0 are parameters
        gone = part.with_gradients(state.loss_value) if is_backward else frozenset()
        placement, rank = self._shared.placement, self._shared.rank
        for visit, strand in carried.crossing:
            transfer = Transfer(strand.value, part.begins + visit - 1, part.begins + visit)
            transfer.users += part.users(strand, visit)
            if placement[visit - 1] == rank:
                transfer.sent = [state.on(visit - 1).kept_edges[strand]]
            if placement[visit] == rank:
                transfer.catch(state.on(visit).kept_leaves[strand])
            if gone:
                transfer.end(gone)
            carried.transfers.add(transfer)
            if any(fork.strand == strand for fork in part.visits[visit - 1].forks):
                carried.transfers.note_use(strand.value, transfer.source)  # which comes next, of the sender's own
        carried.crossing = []
