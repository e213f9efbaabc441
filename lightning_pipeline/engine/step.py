"""One step of several ranks: records the user's step, and runs what was recorded by the schedule or in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_pipeline.engine.ahead import EarlyForwards
from lightning_pipeline.engine.backward_in_order import run_backward
from lightning_pipeline.engine.ending import (
    check_alike,
    check_on_the_way,
    digest_of,
    end_step,
    views_of_module,
    wanted_values,
)
from lightning_pipeline.engine.executor import RankProgram, ScheduleRun, Span
from lightning_pipeline.engine.in_order import InOrder
from lightning_pipeline.engine.leaf_gradients import give_back
from lightning_pipeline.engine.microbatch import Content, EarlyForward, Microbatch, StepResult, contents
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.engine.reads import StepReads
from lightning_pipeline.engine.visit import Visit
from lightning_pipeline.engine.work import LiveCount, StepTask
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.recording.alive import take_alive
from lightning_pipeline.recording.kept_views import kept_views
from lightning_pipeline.recording.module_tensors import as_required
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.provenance import Provenance, made_again
from lightning_pipeline.recording.python_again import run_again
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.runtime.tensor_meta import conform


class PipelineStep:
    """A step on this rank, from the delivery of its batch to the comparison of what ranks ran.

    Each micro-batch's Python runs once (`record`). What follows is decided at its end, where its program is known::

        record ──┬── simple ────────────────────────► waits for its actions in the schedule
                 ├── read values as expected ───────► its forward ran ahead; backward by the schedule
                 └── read values, or is not simple ─► those before it finish, then event by event (`in_order`)

    Args:
        observe: called with every action and its start and end.

    Attributes:
        run: the schedule's execution; None before it begins.
        ahead: the forwards that run before their Python; None if none do.
        in_order: the micro-batches that run event by event, by number.
        live: number of virtual stages' activations alive.
    """

    def __init__(
        self,
        shared: RankResources,
        work: StepTask,
        states: list[Microbatch],
        live: LiveCount,
        observe: Callable[[Span], None] | None,
    ) -> None:
        self.shared, self.work, self.states, self.live = shared, work, states, live
        self.run: ScheduleRun | None = None
        self.ahead: EarlyForwards | None = None
        self.in_order: dict[int, InOrder] = {}
        self._observe = observe
        self._reads = StepReads(self)
        self._num_recorded = 0
        self._is_rest_in_order = False  # an expectation has failed: the remaining micro-batches run in order

    def run_micro_batches(self, program: RankProgram) -> None:
        self.ahead = self._look_ahead()
        self.go_through(program, self._record, prepare=self._record_ahead if self.ahead is None else None)
        self._record(self.states[-1])

    def go_through(
        self, program: RankProgram, record: Callable[[Microbatch], None], prepare: Callable[[int], None] | None = None
    ) -> None:
        """Run a schedule.

        Args:
            record: runs the Python of a micro-batch's step, unless that has been done.
            prepare: the same, called while the rank would otherwise wait; None for never.
        """
        shared = self.shared
        visits = {stage: Visit(stage, self, record) for stage in shared.stages}
        for stage in visits:
            if stage + 1 in visits:
                visits[stage].following, visits[stage + 1].preceding = visits[stage + 1], visits[stage]
        if shared.offload is not None:
            shared.offload.begin(shared.tensors.tensors, is_observed=self._observe is not None)
        before_backward = self._before_backward if self.ahead is not None else None
        self.run = ScheduleRun(program, visits, self._observe, before_backward, prepare)
        self.run.go_on()
        for visit in visits.values():
            visit.following = visit.preceding = None  # break the reference cycles, which keep tensors alive

    def begin_in_order(self, state: Microbatch) -> InOrder:
        """Finish the micro-batches before this one, then switch it to running event by event."""
        run = self.in_order.get(state.index)
        if run is None:
            assert self.run is not None
            shared = self.shared
            if self.ahead is not None and state.is_open:
                shared.expectations.note_miss(shared.beginning(state, self.work))
                assert state.recording is not None
                with as_required(shared.tensors, state.recording.switched):
                    self.ahead.pass_over(state, self.run.go_on, self.live)
                self._is_rest_in_order = True
            assert state.recording is not None
            with as_required(shared.tensors, state.recording.switched):
                self.run.go_on(below=state.index)
            run = self.in_order[state.index] = InOrder(
                state, shared, self.states, training=self.work.loss_of is not None
            )
        return run

    def let_go(self) -> None:
        """Release the micro-batches: placeholders refer to recordings, and these to the step, for a long time."""
        for state in self.states:
            if state.recording is not None:
                state.recording.let_go()
        self.run, self.states, self.in_order, self.ahead = None, [], {}, None

    # -- recording the user's step ----------------------------------------------------------------------------------

    def _record(self, state: Microbatch) -> None:
        """Run the user's step on this and earlier micro-batches that have not been recorded."""
        while self._num_recorded <= state.index:
            one = self.states[self._num_recorded]
            self._num_recorded += 1
            self._record_one(one)

    def _record_ahead(self, microbatch: int) -> None:
        """Run the user's step while this rank would wait, which also lets receives be posted sooner."""
        self._record(self.states[min(microbatch, len(self.states) - 1)])

    def _before_backward(self, microbatch: int) -> None:
        """Run the Python of a micro-batch that ran forward early: only its end tells whether it may run backward."""
        state = self.states[microbatch]
        if state.is_open and not state.is_passed_over:
            self._record(state)

    def _look_ahead(self) -> EarlyForwards | None:
        """Prepare to run the forwards before the Python, if steps like this one have read values; else return None."""
        shared, expected = self.shared, []
        for state in self.states:
            if shared.recorder.has_hooks:
                return None
            expectation = shared.expectations.of(shared.beginning(state, self.work))
            if expectation is None:
                return None
            try:
                captured = made_again(expectation.origins, state.everywhere, partial(shared.draws.seed, state.seed))
            except Exception:  # if it is real, the step's own Python raises it, perhaps inside a try block
                return None
            expected.append(EarlyForward(expectation, captured))
        for state, ahead in zip(self.states, expected, strict=True):
            state.ahead, state.program = ahead, ahead.expectation.program
            state.loss_value, state.asked = ahead.expectation.loss_value, ahead.expectation.asked
        return EarlyForwards(self.states, shared)

    def begin_recording(self, state: Microbatch) -> tuple[Recording, Any]:
        """Begin a micro-batch's recording. Returns it, and the batch with placeholders to pass to the step."""
        structure, shared = state.structure, self.shared
        if self.work.loss_of is not None and any(spec.requires_grad for spec in structure.specs):
            raise NotImplementedError(
                "a tensor of the batch requires a gradient before the step, of which ranks would have parts: call "
                "requires_grad_() on it in training_step"
            )
        beginning = shared.beginning(state, self.work)
        draws, seed = shared.draws, state.seed  # capturing the state would make a reference cycle through its recording
        recording = Recording(shared.recorder, beginning, self._reads, lambda number: draws.seed(seed, number))
        recording.gradients = self.work.gradients
        state.recording = recording
        delivered = state.everywhere
        places = [
            recording.placeholder_for(number, spec, "a tensor of the batch")
            for number, spec in enumerate(structure.large)
        ]
        batch = tree.rebuild(state.layout, structure.joined(delivered, places))
        state.everywhere = []
        recording.memory.note_batch(delivered)
        recording.overlapping = structure.overlapping
        recording.delivered = delivered
        recording.batch_places = [weakref.ref(place) for place in places]
        state.written = dict(enumerate(places))
        if shared.expectations.wants(beginning):
            recording.provenance = Provenance(delivered)
        return recording, batch

    def _record_one(self, state: Microbatch) -> None:
        recording, batch = self.begin_recording(state)
        with recording.running():
            result, state.loss = self.work.step(state, batch)
            state.result = tree.replace(result, self.detached)
            if self.work.loss_of is not None:
                run_again(recording, state.loss)
        del batch
        state.keep_written()
        if self.work.results_on is not None:
            # Drop the placeholders: values that only the result refers to need not be sent to every rank.
            state.result = StepResult.of(state.result, recording)
        del result
        state.contents = contents_of(recording)
        self._end_recording(state, recording)

    def _end_recording(self, state: Microbatch, recording: Recording) -> None:
        """Decide how a micro-batch runs, now that its program is known."""
        value = recording.value_of(state.loss)
        loss_value = -1 if value is None else value
        state.places = {place._pl_value: place for place in take_alive(recording)}
        recording.kept_views = kept_views(recording, [*state.places.values()])
        returned = state.result.values() if isinstance(state.result, StepResult) else ()
        asked = tuple(dict.fromkeys([*state.places, *returned, *([value] if value is not None else [])]))
        shared = self.shared
        if self.ahead is not None and self.ahead.has_ended(state, recording, loss_value, asked):
            shared.expectations.note_hit(shared.beginning(state, self.work))
            return
        program = shared.program_of(state, recording, self.work)
        is_simple = recording.is_simple and not program.needs_order and len(program.visits) <= len(shared.placement)
        is_simple = is_simple and not program.comes_back and not program.writes_again and shared.is_held(program)
        has_read = bool(recording.reads or recording.module_reads)
        if is_simple and not has_read and not state.is_open and not self._is_rest_in_order:
            state.program, state.loss_value, state.asked = program, loss_value, asked
            return
        run = self.begin_in_order(state)
        if has_read:
            shared.expectations.learn(
                shared.beginning(state, self.work),
                recording,
                program,
                can_run_ahead=is_simple,
                loss_value=loss_value,
                asked=asked,
            )
        state.loss_value = loss_value
        self._finish_in_order(state, recording, run, program, asked)

    def _finish_in_order(
        self, state: Microbatch, recording: Recording, run: InOrder, program: Program, asked: Sequence[int]
    ) -> None:
        if self.work.loss_of is not None:  # ranks wait for one another in any case, for gradients
            check_on_the_way(self.states, recording, self.shared.transport, "ends")
        run.run_up_to(recording.event)
        for number in asked:
            tensor = run.value(number)
            if tensor is not None and run.homes[number] >= 0:
                state.kept[number] = tensor.detach()
        state.kept = {number: tensor for number, tensor in state.kept.items() if not tensor.is_meta}
        if self.work.loss_of is not None and state.loss_value >= 0:
            run_backward(run, program, self.work)
        elif self.work.loss_of is not None:
            for stage in self.shared.stages:
                self.work.after_backward(stage, state)
        run.let_go()
        state.is_done = True

    def detached(self, tensor: Tensor) -> Tensor:
        """A tensor that a step returns; the module's own are detached into a value, as this rank may not hold them."""
        is_held = self.shared.tensors.number_of(tensor) is not None or holders_of(tensor) is not None
        return tensor.detach() if is_held else tensor

    # -- the end of the step ----------------------------------------------------------------------------------------

    def end(self, extra: Sequence[float], unchecked: float | None) -> tuple[list[list[float]], float | None]:
        """Compare what ranks ran, and give what the user's code still refers to its data.

        Args:
            extra: numbers to gather on every rank.
            unchecked: the digest of earlier steps that ended without synchronization; None for none.

        Returns:
            Every rank's numbers, and the digest that remains to be compared. Ranks have not synchronized where there
            are no numbers.
        """
        shared, work, states = self.shared, self.work, self.states
        assert shared.transport is not None
        owners = {state.index: {value: shared.owner(state, value) for value in state.places} for state in states}
        wanted = wanted_values(states, owners, shared.placement[0])
        if shared.context is not None:
            check_alike(states, wanted, shared.context.control_group)
        if work.results_on is not None and not work.waits and not wanted and not shared.has_learned:
            unchecked = digest_of(states, wanted, unchecked)
            self._give_results(work.results_on)
            return [], unchecked
        shared.recorder.views_of_module = views_of_module(wanted)
        numbers = end_step(states, wanted, shared.transport, shared.direct, shared.rank, extra)
        if work.results_on is not None:
            self._give_results(work.results_on)
        shared.transport.flush()
        return numbers, unchecked

    def share_leaf_gradients(self) -> None:
        if self.shared.leaf_gradients is None:
            return
        captured = []
        for state in self.states:
            assert state.recording is not None
            places = state.recording.event.program.leaves if self.work.loss_of is not None else ()
            captured += [state.recording.captured[place] for place in places]
        self.shared.leaf_gradients.share(captured)
        for state in self.states:
            assert state.recording is not None
            give_back(state.recording.moved_leaves)

    def set_retained(self) -> None:
        """Set ``.grad`` of the tensors on which `retain_grad` was called."""
        for state in self.states:
            for place, gradient in state.gradients:
                if type(place) is not Placeholder and gradient is not None:
                    place.grad = gradient

    def _give_results(self, rank: int) -> None:
        shared = self.shared
        assert shared.direct is not None
        for state in self.states:
            found: dict[int, Tensor] = {}
            for value, spec in state.result.values().items():
                owner = shared.owner(state, value)
                if owner == shared.rank:
                    own = state.kept[value]
                    if rank == shared.rank:
                        found[value] = own
                    else:
                        shared.direct.send(conform(own, spec), rank)
                elif shared.rank == rank:
                    found[value] = shared.direct.receive(spec, owner)
            state.result = state.result.on(found) if shared.rank == rank else None


def contents_of(recording: Recording) -> Content:
    """What to compare between ranks of a recording's captures.

    Delivered tensors are equal on all ranks and are left out, unless the step has modified them. So is what a stage has
    put in the place of an earlier micro-batch's value, in an earlier part of the step.
    """
    delivered, recording.delivered = recording.delivered, []
    alike = {id(tensor) for tensor in delivered if tensor.is_inference() or not tensor._version}
    known = alike | recording.overwritten | recording.of_stages
    return [*contents(recording.captured, known), *recording.seeds]
