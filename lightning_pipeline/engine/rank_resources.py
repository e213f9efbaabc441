"""What all steps of a rank share: who holds which tensor, how data goes between ranks, and known programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_pipeline.engine.context import ContextRanks
from lightning_pipeline.engine.draws import Draws
from lightning_pipeline.engine.expectations import Expectations
from lightning_pipeline.engine.leaf_gradients import LeafGradients
from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.offloading import Offload
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.keyed_calls import KeyedCalls
from lightning_pipeline.recording.matcher import HookTensor
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.module_writes import average_in, needs_order
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.recorder import Recorder
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.recording.sequence_cut import SequenceCut, cut_sequence
from lightning_pipeline.recording.views import Memory
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.tensor_meta import EVERYWHERE_BYTES
from lightning_pipeline.runtime.transport import Transport


class RankResources:
    """Shared by the steps of a rank.

    Args:
        placement: the rank of each virtual stage.
        calls: tells which stage the running submodule belongs to.
        holders: gives the ranks that hold a tensor of the module, by number.
        offload: sends activations to host memory, or counts them; None for neither.
        context: the ranks that share this one's sequences; None if each has its own.

    Attributes:
        stages: this rank's virtual stages, ascending.
        has_learned: whether the running step, or the last one, ran a program that had not been seen before.
        reached: virtual stages on which any event has run so far.
        uses: the virtual stages that have used each tensor of the module, by name.
    """

    def __init__(
        self,
        rank: int,
        placement: Sequence[int],
        device: torch.device,
        transport: Transport | None,
        tensors: ModuleTensors,
        calls: KeyedCalls,
        holders: Callable[[int], Sequence[int]],
        offload: Offload | None = None,
        context: ContextRanks | None = None,
    ) -> None:
        self.context = context
        self.rank, self.placement, self.device = rank, tuple(placement), device
        self.stages = [stage for stage, place in enumerate(placement) if place == rank]
        self.transport = transport
        self.direct = DirectTransport(transport, device) if transport is not None else None
        self.tensors, self.holders = tensors, holders
        self.leaf_gradients: LeafGradients | None = None
        if transport is not None and self.direct is not None:
            self.leaf_gradients = LeafGradients(tensors, transport, self.direct)
        self.recorder = Recorder(tensors, calls, self.placement)
        self.recorder.warns = rank == 0
        self.draws = Draws(device)
        self.offload = offload
        self.expectations = Expectations()
        self.warnings = StepWarnings(is_first=rank == 0)
        self.has_learned = False
        self.reached: set[int] = set()
        self.uses: dict[str, set[int]] = {}
        self._held: dict[Program, bool] = {}

    def forget_holders(self) -> None:
        """Forget which programs run on ranks that hold what they use."""
        self._held.clear()

    def beginning(self, state: Microbatch, work: StepTask) -> Event:
        """The event at which the paths of this kind of micro-batch begin."""
        return self.recorder.beginning((work.kind, state.structure.key), len(state.structure.large))

    def program_of(self, state: Microbatch, recording: Recording, work: StepTask) -> Program:
        """The program of a recording's path so far, built on first use."""
        program = recording.event.program
        if program is None:
            placement = self.placement_of_gradients
            program = recording.event.program = Program(recording.event, state.structure.large, placement=placement)
            program.needs_order = needs_order(program.events, len(self.placement))
            self._note_uses(program)
            if self.context is not None:
                program.cut = cut_sequence(program, self.context, training=work.loss_of is not None)
                self.warnings.note_joined(program.cut)
            if work.loss_of is not None and work.batch is None:  # others take averages once a batch
                self.warnings.note_average(program, self.tensors, state.num_microbatches)
            self.has_learned = True
        return program

    @property
    def placement_of_gradients(self) -> tuple[int, ...]:
        """The rank of each virtual stage, for gradients that pass from rank to rank; empty where ranks share a stage,
        as their parts of gradients add up in an order of their own."""
        return () if self.context is not None or self.tensors.split_calls else self.placement

    def is_held(self, program: Program) -> bool:
        """Whether every event runs on a rank that holds the module's tensors that it uses, and no other rank holds
        those that it writes into, which would have to get a copy."""
        found = self._held.get(program)
        if found is None:
            found = self._held[program] = self._find_held(program)
        return found

    def _find_held(self, program: Program) -> bool:
        memory = Memory()
        for event in program.events:
            written = memory.note(event)
            rank = self.rank_of(event.visit)
            if any(set(self.holders(number)) != {rank} for number in written):
                return False
            for value in event.inputs:
                if isinstance(value, HookTensor) or (type(value) is int and value < 0):
                    holders = value.ranks if isinstance(value, HookTensor) else self.holders(-1 - value)
                    if rank not in holders:
                        return False
        return True

    def rank_of(self, visit: int) -> int:
        return self.placement[visit % len(self.placement)]

    def owner(self, state: Microbatch, value: int) -> int:
        """The rank that computed a value of a micro-batch."""
        assert state.recording is not None
        program = state.program or state.recording.event.program
        assert program is not None
        return self.rank_of(program.homes[value])

    def spread_kept(self, state: Microbatch, value: int) -> Tensor:
        """A value of an earlier micro-batch, on every rank."""
        assert state.recording is not None and self.direct is not None
        program = state.recording.event.program
        assert program is not None
        return self.direct.spread(state.kept.get(value), program.specs[value], self.rank_of(program.homes[value]))

    def spread_module_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The data of tensors of the module, on every rank."""
        assert self.direct is not None
        found = []
        for tensor in tensors:
            number = self.tensors.number_of(tensor)
            owner = (self.holders(number) if number is not None else holders_of(tensor) or (0,))[0]
            own = tensor.detach() if owner == self.rank else None
            found.append(self.direct.spread(own, TensorSpec.of(tensor), owner))
        return found

    def _note_uses(self, program: Program) -> None:
        for event in program.events:
            stage = event.visit % len(self.placement)
            self.reached.add(stage)
            for value in event.inputs:
                if type(value) is int and value < 0 and not self._stays_everywhere(-1 - value):
                    self.tensors.holders[-1 - value].add(stage)
                    for name in self.tensors.names[-1 - value]:
                        self.uses.setdefault(name, set()).add(stage)

    def _stays_everywhere(self, number: int) -> bool:
        """Whether all ranks keep a buffer whichever of them uses it: all compute with small replicated ones."""
        is_small = TensorSpec.of(self.tensors.tensors[number]).num_bytes <= EVERYWHERE_BYTES
        return is_small and self.tensors.is_replicated(number)


class StepWarnings:
    """Warns once, on the first rank, of what makes training steps slow or may not be meant.

    A warning is issued after the step: the user's code may record warnings.
    """

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first
        self.has_noted_read = self._has_noted_average = False
        self._text: str | None = None

    def issue(self) -> None:
        if self._text is not None:
            warnings.warn(self._text, stacklevel=3)
            self._text = None

    def note_read(self) -> None:
        """A training step of several micro-batches reads a value, and goes on differently each time."""
        self.has_noted_read = True
        self._note(
            f"the training step reads what a stage computes ({users_line()}) and goes on differently each time, "
            f"or prints it, so each micro-batch waits for the one before, and stages do not work at the same time. "
            f"The result is the same; where speed matters, keep or log the tensor, and read it in "
            f"on_train_batch_end"
        )

    def note_joined(self, cut: SequenceCut | None) -> None:
        """Functions between parts of the sequence that are computed on the whole of it, on each rank."""
        if cut is None or not cut.joined:
            return
        first, more = cut.joined[0], len(cut.joined) - 1
        self._note(
            f"each of {cut.ranks.size} ranks computes {first.name} ({first.line}){f' and {more} more' * (more > 0)} on "
            f"the whole sequence, as it is not known to give parts of its result for parts of the sequence. The result "
            f"is the same; context_parallel_size saves nothing there"
        )

    def note_average(self, program: Program, tensors: ModuleTensors, num_microbatches: int) -> None:
        """Find a moving average in a training step, which is updated once per micro-batch."""
        if self._has_noted_average or num_microbatches == 1:
            return
        average = average_in(program.events, tensors.tensors)
        if average is None:
            return
        self._has_noted_average = True
        self._note(
            f"{tensors.names[average.target][0]} takes in {tensors.names[average.source][0]} in training_step "
            f"({average.line}), which runs for each of {num_microbatches} micro-batches: what is meant once a "
            f"batch, as a moving average is, belongs in on_train_batch_end"
        )

    def _note(self, text: str) -> None:
        if self._is_first:
            self._text = text
