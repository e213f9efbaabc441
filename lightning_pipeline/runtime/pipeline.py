"""A step of the pipeline: the batch is delivered, every rank runs the user's step, and computes what it holds."""

from __future__ import annotations

import gc
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.contents import contents
from lightning_pipeline.partition.keyed_calls import KeyedCalls
from lightning_pipeline.partition.matcher import Held
from lightning_pipeline.partition.microbatch import batch_size, num_rows, signature
from lightning_pipeline.partition.module_tensors import ModuleTensors
from lightning_pipeline.partition.module_writes import needs_order
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Look, Placeholder
from lightning_pipeline.partition.program import Program as Tape
from lightning_pipeline.partition.random import mix
from lightning_pipeline.partition.recorder import Recorder
from lightning_pipeline.partition.recording import Recording
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.runtime.collectives import over_all_refused
from lightning_pipeline.runtime.direct import Direct
from lightning_pipeline.runtime.draws import Counted, Draws
from lightning_pipeline.runtime.ending import digest_of, end_step, wanted_values
from lightning_pipeline.runtime.executor import Program, Run, Span
from lightning_pipeline.runtime.hooks import hooks_of_parameters
from lightning_pipeline.runtime.in_order import InOrder
from lightning_pipeline.runtime.leaf_gradients import LeafGradients
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.routes import Channel
from lightning_pipeline.runtime.tensor_meta import EVERYWHERE_BYTES, TensorMeta
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.user_state import set_aside
from lightning_pipeline.runtime.visit import Visit, conform
from lightning_pipeline.runtime.work import LiveCount, Work
from lightning_pipeline.schedules import Kind, Schedule, forward_only, lower

MAX_STRUCTURES = 64
"""Structures that are remembered; the one that was not seen for longest goes first."""


@dataclass(slots=True)
class Structure:
    """What the micro-batches of a step have in common: kind, nesting, and looks of the tensors."""

    key: Hashable
    layout: Layout
    looks: list[Look]


@dataclass(slots=True)
class Announcement:
    """What the first rank tells the others of a step: each micro-batch's structure and size.

    Attributes:
        numbers: each micro-batch's structure, by number.
        sizes: each micro-batch's number of samples.
        new: structures that were not announced before, by number.
        layouts: layouts that differ from their structure's in plain values, by micro-batch.
    """

    numbers: list[int]
    sizes: list[int]
    new: dict[int, Structure]
    layouts: dict[int, Layout]


class Pipeline:
    """Runs steps on this rank's virtual stages.

    Args:
        rank: this rank's place in the pipeline.
        placement: the rank of each virtual stage; the first one is on rank 0.
        tensors: the module's.
        calls: tells the stage of the module that runs.
        holders: the ranks that hold a tensor of the module, by its number.
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
        tensors: ModuleTensors,
        calls: KeyedCalls,
        holders: Callable[[int], Sequence[int]],
        schedule: Callable[[int], Schedule],
        num_microbatches: int,
    ) -> None:
        self.rank = rank
        self.placement = tuple(placement)
        self.num_ranks = max(placement) + 1
        self.num_virtual_stages = len(placement) // self.num_ranks
        self.last_rank = placement[-1]
        self.num_microbatches = num_microbatches
        self.observe: Callable[[Span], None] | None = None
        """Gets every action of a step with its start and end."""
        self.learning = False
        """Whether the last step had something that was not known before."""
        self.peak_live = 0
        """The most activations of virtual stages that were live on this rank at once in the last step."""
        self.stages = [stage for stage, place in enumerate(placement) if place == rank]
        """This rank's virtual stages, ascending."""
        self.recorder = Recorder(tensors, calls, self.placement)
        self.recorder.warns = rank == 0
        self._tensors = tensors
        self._holders = holders
        self._device = device
        self._transport = transport
        self._direct = Direct(transport, device) if transport is not None else None
        self._leaf_gradients: LeafGradients | None = None
        if transport is not None and self._direct is not None:
            self._leaf_gradients = LeafGradients(tensors, transport, self._direct)
        self._draws = Draws(device)
        self._schedule = schedule
        self._programs: dict[tuple[bool, int], Program] = {}
        self._structures: OrderedDict[int, Structure] = OrderedDict()
        self._by_key: dict[Hashable, int] = {}
        self._next_number = 0
        self._work: Work | None = None
        self._run: Run | None = None
        self._microbatches: list[Microbatch] = []
        self._in_order: dict[int, InOrder] = {}
        self._live = LiveCount()
        self._uses: dict[str, set[int]] = {}
        self._unchecked: float | None = None
        self.reached: set[int] = set()
        """Virtual stages on which steps have run anything."""
        self._held: dict[Tape, bool] = {}
        self._has_warned_of_reads = False
        self._parts: list[tuple[Tensor, Tensor]] = []  # of the batch on the first rank, with what the step has of each

    def run(
        self, work: Work, microbatches: list[Any] | None, extra: Callable[[], Sequence[float]] = list
    ) -> tuple[list[Microbatch], list[list[float]]]:
        """Run one step.

        Args:
            microbatches: the first rank's; the others receive theirs.
            extra: numbers that every rank gets of every rank when the step ends.

        Returns:
            The micro-batches with their results, and every rank's numbers; none where ranks did not wait for one
            another.
        """
        announcement, tensors = self._announce(work, microbatches)
        self._work, self._live, self._in_order = work, LiveCount(), {}
        self._microbatches = states = self._states(work, announcement)
        self.learning = False
        self.recorder.recordings.clear()
        if self._tensors.refresh():
            self.recorder.forget()
        if self.recorder.trim():
            self._held.clear()
        self.recorder.has_hooks = self.num_ranks > 1 and bool(hooks_of_parameters(self._tensors))
        installed = self.recorder.installed() if self.num_ranks > 1 else nullcontext()
        with self._draws.kept(), _no_collection(), installed, over_all_refused():
            self._deliver(states, tensors)
            if self.num_ranks == 1:
                self._run_alone(work, states)
                numbers = [list(extra())]
            else:
                if self._leaf_gradients is not None:
                    self._leaf_gradients.begin()
                self._run_in_stages(work, states)
                numbers = self._end(work, states, extra)
                self._write_back()
                _set_retained(states)
                self._share_leaf_gradients(work, states)
        for state in states:
            if state.recording is not None:
                state.recording.let_go()
        self.peak_live = self._live.peak
        self._run, self._microbatches, self._in_order = None, [], {}
        return states, numbers

    def check(self) -> None:
        """Make sure that ranks ran the same in steps at whose ends they did not wait for one another. All must call it.

        Raises:
            RuntimeError: they did not.
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

    def take_uses(self) -> dict[str, set[int]]:
        """The virtual stages that have used tensors of the module, by name, since this was asked last."""
        uses, self._uses = self._uses, {}
        return uses

    def note_release(self) -> None:
        """Ranks hold other tensors than before."""
        self._held.clear()

    # -- what recordings ask for ------------------------------------------------------------------------------------

    def read(self, recording: Recording, values: Sequence[int]) -> list[Tensor]:
        """The data of values of a micro-batch whose step is running, on every rank."""
        state = next(one for one in self._microbatches if one.recording is recording)
        self._warn_of_reads()
        with set_aside():
            if state.program is not None:  # an earlier one
                assert self._run is not None and self._direct is not None
                self._run.go_on(below=state.index + 1)
                return [self._spread_kept(state, value) for value in values]
            run = self._begin_in_order(state)
            if not state.is_done:
                run.run_up_to(recording.event)
            return run.data_of(values)

    def _warn_of_reads(self) -> None:
        """Say once what it costs that a step's Python waits for its own results."""
        assert self._work is not None
        if self._has_warned_of_reads or self._work.loss_of is None or len(self._microbatches) == 1:
            return
        self._has_warned_of_reads = True
        if self.rank == 0:
            warnings.warn(
                f"the training step reads what a stage computes ({users_line()}), so each micro-batch waits for the "
                f"one before, and stages do not work at the same time. The result is the same; where speed matters, "
                f"keep or log the tensor, and read it in on_train_batch_end",
                stacklevel=2,
            )

    def _spread_kept(self, state: Microbatch, value: int) -> Tensor:
        """A value of an earlier micro-batch, on every rank."""
        assert state.recording is not None and self._direct is not None
        program = state.recording.event.program
        assert program is not None
        owner = self.placement[program.homes[value] % len(self.placement)]
        return self._direct.spread(state.kept.get(value), program.looks[value], owner)

    def read_held(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The data of tensors that some ranks hold, on every rank."""
        found = []
        assert self._direct is not None
        with set_aside():
            for tensor in tensors:
                number = self._tensors.number_of(tensor)
                owner = (self._holders(number) if number is not None else holders_of(tensor) or (0,))[0]
                own = tensor.detach() if owner == self.rank else None
                found.append(self._direct.spread(own, Look.of(tensor), owner))
        return found

    def finish_before(self, recording: Recording, *, with_own: bool) -> None:
        """Do what there is to do of earlier micro-batches, and of a recording's own calls so far."""
        state = next(one for one in self._microbatches if one.recording is recording)
        assert self._run is not None
        with set_aside():
            if with_own:
                self._begin_in_order(state).run_up_to(recording.event)
            else:
                self._run.go_on(below=state.index)

    def shown(self, recording: Recording, value: int, show: Callable[[Tensor], str]) -> str:
        """The text of a value, or of a tensor of the module, with what autograd knows of it."""
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

    def _run_alone(self, work: Work, states: list[Microbatch]) -> None:
        """One rank runs the user's steps as they are."""
        program = self.program(training=work.loss_of is not None, num_microbatches=len(states))
        for state in states:
            began = time.perf_counter()
            counted = Counted(self._draws, state.seed)
            with counted.running():
                state.result, state.loss = work.step(state, tree.rebuild(state.layout, state.tensors))
            self._live.add()
            began = self._tell_alone(state, began, program, is_forward=True)
            if work.loss_of is not None:
                if state.loss is not None:
                    loss, state.loss = state.loss, state.loss.detach()
                    self._draws.seed(state.seed, counted.number)  # as hooks may draw
                    work.run_backward(work.loss_of(state, loss))
                    del loss
                for stage in self.stages:
                    work.after_backward(stage, state)
                self._tell_alone(state, began, program, is_forward=False)
            self._live.now -= 1
            state.result = tree.replace(state.result, Tensor.detach)

    def _tell_alone(self, state: Microbatch, began: float, program: Program, *, is_forward: bool) -> float:
        """Tell of the actions that one rank has done at once; the first of them has taken all the time."""
        now = time.perf_counter()
        if self.observe is not None:
            for action in program.actions:
                if action.microbatch == state.index and (action.kind is Kind.F) is is_forward:
                    self.observe((action, began, now))
                    began = now
        return now

    def _run_in_stages(self, work: Work, states: list[Microbatch]) -> None:
        program = self.program(training=work.loss_of is not None, num_microbatches=len(states))
        visits = {
            stage: Visit(
                stage,
                self.placement,
                transport=self._transport,
                microbatches=states,
                record=self._record,
                tensors=self._tensors.tensors,
                seed_draw=self._draws.seed,
                work=work,
                live=self._live,
            )
            for stage in self.stages
        }
        for stage in visits:
            if stage + 1 in visits:
                visits[stage].following, visits[stage + 1].preceding = visits[stage + 1], visits[stage]
        self._run = Run(program, visits, self.observe)
        self._run.go_on()
        for visit in visits.values():
            visit.following = visit.preceding = None  # whose cycles would keep the step's tensors

    def _record(self, state: Microbatch) -> None:
        """Run the user's step on a micro-batch and on those before it."""
        for one in self._microbatches[: state.index + 1]:
            if one.recording is None:
                self._record_one(one)

    def _record_one(self, state: Microbatch) -> None:
        work = self._work
        assert work is not None
        structure = self._structures[state.structure]
        large = [look for look in structure.looks if not _is_everywhere(look)]
        if work.loss_of is not None and any(look.requires_grad for look in structure.looks):
            raise NotImplementedError(
                "a tensor of the batch requires a gradient before the step, of which ranks would have parts: call "
                "requires_grad_() on it in training_step"
            )
        beginning = self.recorder.beginning((work.kind, structure.key), len(large))
        seed = state.seed  # and not the state, which refers to the recording
        recording = Recording(self.recorder, beginning, self, lambda number: self._draws.seed(seed, number))
        state.recording = recording
        tensors: list[Tensor] = []
        given = 0
        for look, tensor in zip(structure.looks, state.tensors, strict=True):
            if _is_everywhere(look):
                tensors.append(tensor)
            else:
                tensors.append(recording.placeholder_for(given, look, "a tensor of the batch"))
                given += 1
        state.given = [
            tensor
            for look, tensor in zip(structure.looks, state.tensors, strict=True)
            if not _is_everywhere(look)
        ] if self.rank == self.placement[0] else []  # fmt: skip
        state.tensors = []
        batch = tree.rebuild(state.layout, tensors)
        delivered = [tensor for tensor in tensors if type(tensor) is not Placeholder]
        recording.note_batch(delivered)
        del tensors
        with recording.running():
            result, state.loss = work.step(state, batch)
            state.result = tree.replace(result, self._own)
        del batch
        if work.results_on is not None:
            # Not the placeholders: what nobody else refers to need not come to every rank.
            state.result = _Result.of(state.result, recording)
        del result
        alike = {id(tensor) for tensor in delivered if tensor.is_inference() or not tensor._version}
        state.contents = [*contents(recording.captured, alike | recording.overwritten), *recording.seeds]
        self._end_recording(state, recording, large, work)

    def _end(
        self, work: Work, states: list[Microbatch], extra: Callable[[], Sequence[float]]
    ) -> list[list[float]]:
        assert self._transport is not None
        wanted = wanted_values(states, self._owners(states))
        if work.results_on is not None and not work.waits and not wanted and not self.learning:
            self._unchecked = digest_of(states, wanted, self._unchecked)
            self._give_results(states, work.results_on)
            return []
        numbers = end_step(states, wanted, self._transport, self._direct, self.rank, extra())
        if work.results_on is not None:
            self._give_results(states, work.results_on)
        self._transport.flush()
        return numbers

    def _share_leaf_gradients(self, work: Work, states: list[Microbatch]) -> None:
        captured = []
        for state in states:
            assert state.recording is not None
            places = state.recording.event.program.leaves if work.loss_of is not None else ()
            captured += [state.recording.captured[place] for place in places]
        if captured and self._leaf_gradients is not None:
            self._leaf_gradients.share(captured)

    def _own(self, tensor: Tensor) -> Tensor:
        """A tensor that a step returns; for one of the module, which may not be on this rank, a value of its own."""
        is_held = self._tensors.number_of(tensor) is not None or holders_of(tensor) is not None
        return tensor.detach() if is_held else tensor

    def _give_results(self, states: Sequence[Microbatch], rank: int) -> None:
        """Give a rank what the steps have returned."""
        assert self._direct is not None
        for state in states:
            found: dict[int, Tensor] = {}
            for value, look in state.result.values().items():
                owner = self._owner(state, value)
                if owner == self.rank:
                    own = state.kept[value]
                    if rank == self.rank:
                        found[value] = own
                    else:
                        self._direct.send(conform(own, look), rank)
                elif self.rank == rank:
                    found[value] = self._direct.receive(look, owner)
            state.result = state.result.on(found) if self.rank == rank else None

    def _end_recording(self, state: Microbatch, recording: Recording, large: list[Look], work: Work) -> None:
        value = recording.value_of(state.loss)
        state.loss_value = -1 if value is None else value
        state.places = {place.value: place for place in recording.take_alive()}
        returned = state.result.values() if isinstance(state.result, _Result) else ()
        program = recording.event.program
        if program is None:
            program = recording.event.program = Tape(recording.event, large)
            program.needs_order = needs_order(program.events, len(self.placement))
            self._note_uses(program)
            self.learning = True
        is_simple = recording.is_simple and not program.needs_order and len(program.visits) <= len(self.placement)
        is_simple = is_simple and not program.comes_back and not program.writes_again and self._is_held(program)
        if is_simple and state.index not in self._in_order:
            state.program = program
            state.asked = tuple(dict.fromkeys([*state.places, *returned, *([value] if value is not None else [])]))
            return
        run = self._begin_in_order(state)
        run.run_up_to(recording.event)
        for number in dict.fromkeys([*state.places, *returned, *([value] if value is not None else [])]):
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

    def _note_uses(self, program: Tape) -> None:
        for event in program.events:
            self.reached.add(event.visit % len(self.placement))
            for value in event.inputs:
                if type(value) is int and value < 0 and not self._stays_everywhere(-1 - value):
                    self._tensors.holders[-1 - value].add(event.visit % len(self.placement))
                    for name in self._tensors.names[-1 - value]:
                        self._uses.setdefault(name, set()).add(event.visit % len(self.placement))

    def _stays_everywhere(self, number: int) -> bool:
        """Whether all ranks keep a buffer though one of them uses it: what is made of small ones, each makes itself."""
        return self._tensors.is_replicated(number) and _is_everywhere(Look.of(self._tensors.tensors[number]))

    def _is_held(self, program: Tape) -> bool:
        """Whether every event runs where the module's tensors are that it takes."""
        found = self._held.get(program)
        if found is None:
            found = self._held[program] = all(
                self.placement[event.visit % len(self.placement)]
                in (value.ranks if isinstance(value, Held) else self._holders(-1 - value))
                for event in program.events
                for value in event.inputs
                if isinstance(value, Held) or (type(value) is int and value < 0)
            )
        return found

    def _begin_in_order(self, state: Microbatch) -> InOrder:
        """A micro-batch runs event by event, once those before it are done with."""
        run = self._in_order.get(state.index)
        if run is None:
            assert self._run is not None and self._work is not None
            self._run.go_on(below=state.index)
            large = [look for look in self._structures[state.structure].looks if not _is_everywhere(look)]
            run = self._in_order[state.index] = InOrder(
                state,
                large,
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

    def _spread_kept_of(self, recording: Recording, value: int) -> Tensor:
        return self._spread_kept(next(one for one in self._microbatches if one.recording is recording), value)

    def _owners(self, states: Sequence[Microbatch]) -> dict[int, dict[int, int]]:
        """The rank that has computed each value of each micro-batch that somebody refers to."""
        return {state.index: {value: self._owner(state, value) for value in state.places} for state in states}

    def _owner(self, state: Microbatch, value: int) -> int:
        assert state.recording is not None
        program = state.program or state.recording.event.program
        assert program is not None
        return self.placement[program.homes[value] % len(self.placement)]

    # -- the batch --------------------------------------------------------------------------------------------------

    def _deliver(self, states: list[Microbatch], tensors: list[list[Tensor]] | None) -> None:
        """Give every rank the tensors that all compute with."""
        self._parts = []
        if tensors is not None:
            for state, own in zip(states, tensors, strict=True):
                if self.num_ranks == 1:
                    # Parts of one tensor count writes together, though no micro-batch writes into another one's.
                    state.tensors = [t.data if _is_everywhere(Look.of(t)) else t for t in own]
                    continue
                # As on the other ranks: no parts of one tensor.
                state.tensors = [t.detach().clone() if _is_everywhere(Look.of(t)) else t for t in own]
                self._parts += [(t, part) for t, part in zip(own, state.tensors, strict=True) if part is not t]
            for peer in range(1, self.num_ranks):
                assert self._transport is not None
                for packed in _packed(states, self._structures):
                    self._transport.send(packed, peer, Channel.BATCH)
            return
        assert self._transport is not None
        for state in states:
            state.tensors = [_ABSENT] * len(self._structures[state.structure].looks)
        arriving = []
        for places, dtype in _columns(states, self._structures):
            size = sum(self._look(states, place).shape.numel() for place in places)
            arriving.append((places, self._transport.recv(TensorMeta((size,), (1,), dtype), 0, Channel.BATCH)))
        for places, receive in arriving:
            flat = receive.wait("the batch")
            offset = 0
            for index, number in places:
                look = self._look(states, (index, number))
                size = look.shape.numel()
                states[index].tensors[number] = flat[offset : offset + size].reshape(look.shape).clone()
                offset += size

    def _write_back(self) -> None:
        """What the step has written into its batch, the loader finds there, as in one process."""
        parts, self._parts = self._parts, []
        for tensor, part in parts:
            if type(part) is not Placeholder and (part.is_inference() or part._version):
                with torch.no_grad():
                    tensor.copy_(part)

    def _look(self, states: list[Microbatch], place: tuple[int, int]) -> Look:
        return self._structures[states[place[0]].structure].looks[place[1]]

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
        for number in announcement.numbers:
            if number not in announcement.new:
                self._structures.move_to_end(number)
        for number, structure in announcement.new.items():
            self._structures[number] = structure
            self._by_key[structure.key] = number
        while len(self._structures) > max(MAX_STRUCTURES, len(announcement.numbers)):
            _, structure = self._structures.popitem(last=False)
            del self._by_key[structure.key]
        return announcement, tensors

    def _states(self, work: Work, announcement: Announcement) -> list[Microbatch]:
        total = sum(announcement.sizes)
        even = len(set(announcement.sizes)) == 1
        return [
            Microbatch(
                index=index,
                structure=number,
                layout=announcement.layouts.get(index, self._structures[number].layout),
                num_samples=announcement.sizes[index],
                weight=announcement.sizes[index] / total,
                num_microbatches=len(announcement.numbers),
                even=even,
                seed=mix(work.seed, index),
            )
            for index, number in enumerate(announcement.numbers)
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
                announcement.new[number] = Structure(key, layout, [Look.of(tensor) for tensor in tensors])
                self._by_key[key] = number
            else:
                known = announcement.new.get(number) or self._structures[number]
                if not _same(layout, known.layout):
                    announcement.layouts[index] = layout
            announcement.numbers.append(number)
            sizes.append(num_rows(tensors) or batch_size(microbatch))
            all_tensors.append(tensors)
        # Where a split of the user's leaves open how many samples there are, micro-batches count alike.
        announcement.sizes.extend(size if None not in sizes else 1 for size in sizes)  # type: ignore[misc]
        return announcement, all_tensors


@dataclass(slots=True)
class _Result:
    """What a step has returned, without its placeholders.

    Attributes:
        tensors: data, or the number and the look of a value.
    """

    layout: Layout
    tensors: list[Tensor | tuple[int, Look]]

    @classmethod
    def of(cls, result: Any, recording: Recording) -> _Result:
        tensors, layout = tree.flatten(result)
        numbers = [recording.value_of(tensor) for tensor in tensors]
        return cls(layout, [t if n is None else (n, Look.of(t)) for t, n in zip(tensors, numbers, strict=True)])

    def values(self) -> dict[int, Look]:
        return dict(item for item in self.tensors if isinstance(item, tuple))

    def on(self, data: dict[int, Tensor]) -> Any:
        tensors = [data[item[0]] if isinstance(item, tuple) else item for item in self.tensors]
        return tree.rebuild(self.layout, tensors)


_ABSENT = torch.empty(0, device="meta")


def _is_everywhere(look: Look) -> bool:
    return look.num_bytes <= EVERYWHERE_BYTES and not look.requires_grad


def _columns(
    states: Sequence[Microbatch], structures: OrderedDict[int, Structure]
) -> Iterator[tuple[list[tuple[int, int]], torch.dtype]]:
    """Tensors that travel together: those of a dtype, each as micro-batch and number."""
    found: dict[torch.dtype, list[tuple[int, int]]] = {}
    for state in states:
        for number, look in enumerate(structures[state.structure].looks):
            if _is_everywhere(look):
                found.setdefault(look.dtype, []).append((state.index, number))
    for dtype, places in found.items():
        yield places, dtype


def _packed(states: Sequence[Microbatch], structures: OrderedDict[int, Structure]) -> Iterator[Tensor]:
    for places, _ in _columns(states, structures):
        yield torch.cat([states[index].tensors[number].reshape(-1) for index, number in places])


def _set_retained(states: Sequence[Microbatch]) -> None:
    """Give what `retain_grad` was called on its gradient."""
    for state in states:
        for place, gradient in state.gradients:
            if type(place) is not Placeholder and gradient is not None:
                place.grad = gradient


@contextmanager
def _no_collection() -> Iterator[None]:
    """Ranks let go of what they let go of at the same points of the user's code."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _same(layout: Layout, other: Layout) -> bool:
    try:
        return bool(layout == other)
    except (RuntimeError, ValueError):  # constants that compare elementwise, such as arrays
        return False
