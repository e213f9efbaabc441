"""Runs micro-batches one by one, event by event: for steps that read values or return to an earlier stage.

Each event runs on the rank of its visit, when one of its values is read or the step ends. Operands from other visits
are sent there directly. All ranks walk through the same events in the same order, so each knows which
rank sends what to which.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.engine.checkpointed import CheckpointedFunctions
from lightning_pipeline.engine.gradient_hooks import HookCalls
from lightning_pipeline.engine.microbatch import ContinuedStep, Microbatch
from lightning_pipeline.engine.transfers import Transfer, Transfers, by_leaves
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.backward_calls import backward_from
from lightning_pipeline.recording.event import CHECKPOINT_BEGINS, CHECKPOINT_ENDS, GRADIENTS_SWITCHED, Event
from lightning_pipeline.recording.execution import run_event, values_made
from lightning_pipeline.recording.inference import writes_beside
from lightning_pipeline.recording.matcher import HookTensor
from lightning_pipeline.recording.module_tensors import ModuleTensors, set_requires_grad
from lightning_pipeline.recording.module_writes import ModuleWrites
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.repeated_uses import EXACT_BYTES, is_differentiable
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.tensor_meta import conform


class InOrder:
    """Runs one micro-batch's events.

    Args:
        placement: the rank of each virtual stage.
        holders: gives the ranks that hold a tensor of the module, by number; the first one sends it to the others.
        earlier: gives the data of an earlier micro-batch's value on every rank; all ranks call it.
    """

    def __init__(
        self,
        state: Microbatch,
        specs: Sequence[TensorSpec],
        placement: Sequence[int],
        rank: int,
        tensors: ModuleTensors,
        direct: DirectTransport | None,
        *,
        holders: Callable[[int], Sequence[int]],
        seed_draw: Callable[[int, int], None],
        training: bool,
        earlier: Callable[[Any, int], Tensor],
    ) -> None:
        self._earlier = earlier
        self._state = state
        self._placement = placement
        self._rank = rank
        self._tensors = tensors
        self._direct = direct
        self._holders = holders
        self._seed_draw = seed_draw
        self.specs: dict[int, TensorSpec] = dict(enumerate(specs))
        self.homes: dict[int, int] = dict.fromkeys(range(len(specs)), 0)
        self._here: dict[tuple[int, int], Tensor] = {}
        self._transfers = Transfers(state.index, placement, rank, direct, training=training)
        self._done: Event | None = None
        self._writes = ModuleWrites()
        if state.carried is not None:
            self._transfers, self._done = state.carried.transfers, state.carried.event
            before = state.carried.program
            self.specs = {value: spec for value, spec in before.specs.items() if value >= 0}
            self.homes = {value: visit for value, visit in before.homes.items() if value >= 0}
            self._here.update(state.carried.here)
            for event in state.carried.program.events:
                self._writes.of(event)
        self._rank_of = self._transfers.rank_of
        self._checkpointed = CheckpointedFunctions(self._seed)
        self._written_again: dict[int, tuple[int, Event]] = {}  # the module's tensors that backward writes into
        if self._rank == placement[0]:
            for value, tensor in enumerate(state.given):
                self._here[0, value] = tensor

    def run_up_to(self, end: Event) -> None:
        """Run the events of a path up to `end` that have not run yet."""
        todo: list[Event] = []
        event: Event | None = end
        while event is not None and event.parent is not None and event is not self._done:
            todo.append(event)
            event = event.parent
        self._done = end
        for event in todo:
            if event.visit < 0 and event.function is GRADIENTS_SWITCHED:
                number, before, _ = event.call.args
                set_requires_grad(self._tensors.tensors[number], before)
        self._checkpointed.note_gradients(todo)
        for event in reversed(todo):
            self._run(event)
        assert self._state.recording is not None
        self._state.recording.switched.clear()

    def data_of(self, values: Sequence[int]) -> list[Tensor]:
        """The data of values, on every rank."""
        found = []
        for value in values:
            visit = self.homes[value]
            owner = self._rank_of(visit)
            tensor = self._here[visit, value].detach() if owner == self._rank else None
            if self._direct is not None:
                tensor = self._direct.spread(tensor, self.specs[value], owner)
            assert tensor is not None
            found.append(tensor.clone() if owner == self._rank else tensor)
        return found

    def data_of_module(self, number: int) -> Tensor:
        """The data of a tensor of the module, on every rank."""
        owner = self._holders(number)[0]
        tensor = self._tensors.tensors[number]
        if self._direct is None:
            return tensor.detach()
        return self._direct.spread(tensor.detach() if owner == self._rank else None, TensorSpec.of(tensor), owner)

    def value(self, value: int) -> Tensor | None:
        """A value's tensor; None if another rank computed it."""
        return self._here.get((self.homes[value], value))

    def let_go(self) -> None:
        """Free the micro-batch's tensors."""
        self._here.clear()
        self._transfers.let_go()

    def carry_on(self, event: Event, program: Program, values: Container[int]) -> ContinuedStep:
        """The state that the step continues with after a synchronization point.

        Only `values` are kept: graphs hold what they need themselves, and copies of the module's tensors become stale.
        """
        here = {key: tensor for key, tensor in self._here.items() if key[1] in values}
        return ContinuedStep(event, program, self._transfers, here)

    def backward(self, program: Program, work: StepTask, *, retain_graph: bool = False) -> None:
        """Run backward from the micro-batch's loss, visit by visit."""
        state = self._state
        state.let_age()
        wanted = program.with_gradients(state.loss_value)
        transfers = self._transfers.returning(wanted)
        last = max(self.homes.values(), default=0)
        assert state.recording is not None
        hooks = HookCalls(state.recording, self._tensors, self._direct, self, self._seed)
        self._check_hooked(hooks, program, wanted)
        gradients: dict[int, list[Tensor]] = {}
        self._transfers.merge()
        repeated = self._used_repeatedly(program)
        # Sum this micro-batch's gradients apart from earlier ones': floating-point addition is not associative.
        before = [(tensor, tensor.grad) for tensor, _ in repeated]
        for tensor, _ in repeated:
            tensor.grad = None
        # Every rank loops over all visits, as gradients and hook calls travel between any two of them.
        for visit in range(last, -1, -1):
            is_mine = self._rank_of(visit) == self._rank
            if hooks.are_there and not is_mine:
                hooks.listen(self._rank_of(visit))
            with hooks.told() if hooks.are_there and is_mine else nullcontext():
                continued = [tensor for tensor, own in repeated if visit in own]
                self._backward_of(visit, transfers, gradients, work, continued, retain_graph=retain_graph)
            for index, one in reversed(list(enumerate(transfers))):
                if one.destination == visit:
                    is_value = one.value >= 0
                    spec = self.specs[one.value] if is_value else TensorSpec.of(self._tensors.tensors[-1 - one.value])
                    given = gradients[index] = self._transfers.give_back(one, spec, is_repeated=retain_graph)
                    if one.source > visit and given:  # a parameter's: the source's turn is over
                        backward_from(one.sent[::-1], given, retain_graph=retain_graph)
        self._transfers.end_backward(transfers, is_repeated=retain_graph)
        for number, (visit, event) in self._written_again.items():
            self._share_write(number, visit, event, is_replaced=False)
        self._written_again.clear()
        for parameter, gradient in before:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        for stage in reversed(range(len(self._placement))):
            if self._placement[stage] == self._rank:
                work.after_backward(stage, state)
        state.gradients = [(place, self._retained(value)) for value, place in state.recording.retained]

    def _used_repeatedly(self, program: Program) -> list[tuple[Tensor, set[int]]]:
        """Parameters of this rank that several visits use, with those of this rank.

        In one process, autograd sums a micro-batch's uses of a parameter before it adds them to ``.grad``.
        """
        visits: dict[int, set[int]] = {}
        for event in program.events:
            for value in event.inputs:
                if type(value) is int and value < 0 and event.visit >= 0:
                    visits.setdefault(-1 - value, {self.homes.get(value, event.visit)}).add(event.visit)
        tensors = self._tensors.tensors
        return [
            (tensors[number], {visit for visit in users if self._rank_of(visit) == self._rank})
            for number, users in visits.items()
            if len(users) > 1
            and self._rank in map(self._rank_of, users)
            and tensors[number].is_leaf
            and tensors[number].requires_grad
        ]

    def _backward_of(
        self,
        visit: int,
        transfers: list[Transfer],
        gradients: dict[int, list[Tensor]],
        work: StepTask,
        continued: Sequence[Tensor],
        *,
        retain_graph: bool,
    ) -> None:
        """Run backward on a visit, on its rank.

        Args:
            continued: parameters whose gradient from later visits is passed in as a root, so that autograd adds this
                visit's uses to it one by one.
        """
        if self._rank_of(visit) != self._rank:
            return
        state = self._state
        roots: list[Any] = []
        given: list[Tensor] = []
        for index, one in reversed(list(enumerate(transfers))):
            if one.source == visit and one.sent and gradients.get(index):
                roots += one.sent[::-1]
                given += gradients[index]
        if self.homes.get(state.loss_value) == visit:
            loss = self._here[visit, state.loss_value]
            assert work.loss_of is not None
            weighted = work.loss_of(state, loss)
            if roots:
                roots.append(weighted)
                given.append(torch.ones_like(weighted))
            elif retain_graph:
                work.run_backward(weighted, retain_graph=True)
            else:
                work.run_backward(weighted)
        for parameter in continued if roots else ():
            if parameter.grad is not None:
                roots.append(torch.ops.aten.alias.default(parameter))  # the newest node, which autograd runs first
                given.append(parameter.grad)
                parameter.grad = None
        if roots:
            backward_from(roots, given, retain_graph=retain_graph)

    def _check_hooked(self, hooks: HookCalls, program: Program, wanted: Container[int]) -> None:
        """Reject hooks on parameters that several visits use: they would see parts of the gradient."""
        for number in hooks.parameters:
            users = (event for event in program.events if -1 - number in event.inputs)
            visits = {event.visit for event in users if any(value in wanted for value in event.made())}
            if len(visits) > 1:
                raise NotImplementedError(
                    f"{self._tensors.names[number][0]} has a hook on its gradient, and takes part on several stages or "
                    f"several times on one: use its gradient in on_after_backward"
                )

    def _retained(self, value: int) -> Tensor | None:
        """The gradient of a value on which `retain_grad` was called, on every rank."""
        owner = self._rank_of(self.homes[value])
        own = self._here[self.homes[value], value].grad if owner == self._rank else None
        if self._direct is None:
            return own
        if owner == self._rank:
            self._direct.tell(own is not None)
        elif not self._direct.hear(owner, "a retained gradient"):
            return None
        return None if owner == self._rank and own is None else self._direct.spread(own, self.specs[value], owner)

    def _run(self, event: Event) -> None:
        visit = event.visit
        if visit < 0:
            self._mark(event)
            return
        is_mine = self._rank_of(visit) == self._rank
        self._checkpointed.note_visit(visit)
        operands: list[Tensor] = []
        for slot, value in enumerate(event.inputs):
            if not isinstance(value, int):
                place = event.matcher.captured_tensors[slot]
                recording = self._state.recording
                assert recording is not None
                content = recording.captured[event.first_captured + place]
                if isinstance(content, tuple):
                    content = self._earlier(*content)
                elif isinstance(value, HookTensor):
                    content = self._held(content, value.ranks, visit)
                operands.append(content)
            elif value < 0:
                operands.append(self._module_tensor(-1 - value, event, slot))
            else:
                is_named = event.writes_into(slot) or event.function is torch.autograd.grad
                operands.append(self._operand(value, event, slot, is_named=is_named))
        if is_mine:
            recording = self._state.recording
            assert recording is not None
            part = self._checkpointed.part_of(visit, recording.captured)
            if part is not None:
                found = part.run(event, operands)
            elif event.function is torch.autograd.grad:
                leaves = {
                    id(tensor): self._transfers.leaves(value, visit)
                    for value, tensor in zip(event.inputs, operands, strict=True)
                    if type(value) is int
                }
                found = run_event(event, operands, recording.captured, self._seed, by_leaves(leaves))
            else:
                found = run_event(event, operands, recording.captured, self._seed)
            if event.result.repeats and part is None:
                self._transfers.note_made(operands, tree.leaves(found))
            for value, tensor in values_made(event, operands, found):
                self._here[visit, value] = tensor
        for spec, value in (*zip(event.result.tensors, event.outputs, strict=True), *(w[1:] for w in event.writes)):
            if value is not None:
                assert isinstance(spec, TensorSpec)
                self.specs[value], self.homes[value] = spec, visit
        for number, is_replaced in self._writes.of(event).items():
            self._note_written_again(number, visit, event)
            self._share_write(number, visit, event, is_replaced=is_replaced)

    def _note_written_again(self, number: int, visit: int, event: Event) -> None:
        """Note a write into the module that backward repeats, as it recomputes the function that makes it.

        Raises:
            NotImplementedError: another visit writes into the same tensor, of which one of the two has only a copy.
        """
        is_repeated = self._checkpointed.runs and not self._checkpointed.is_kept
        before, _ = self._written_again.get(number, (visit, event))
        if before != visit:
            ranks = {self._rank_of(before)} | ({self._rank_of(visit)} if is_repeated else set())
            if len(ranks) > 1 or not ranks <= {*self._holders(number)}:
                raise NotImplementedError(
                    f"{self._tensors.names[number][0]} is written into by a checkpointed function, which backward runs "
                    f"again, and on another stage ({event.line}): do without the checkpoint, or let one stage hold both"
                )
        if is_repeated:
            self._written_again[number] = visit, event

    def _share_write(self, number: int, visit: int, event: Event, *, is_replaced: bool) -> None:
        """Copy a tensor of the module that an event modified on one rank to the other ranks that hold it."""
        writer = self._rank_of(visit)
        spec = next((spec for slot, spec, _ in event.writes if event.inputs[slot] == -1 - number), None)
        tensor = self._tensors.tensors[number]
        spec = spec or TensorSpec.of(tensor)
        for key in [key for key in self._here if key[1] == -1 - number and key[0] != visit]:
            del self._here[key]
        holders = self._holders(number)
        if writer == self._rank:
            own = tensor if writer in holders else self._here[visit, -1 - number]
            for rank in holders:
                if rank != writer:
                    assert self._direct is not None
                    self._direct.send(conform(own.detach(), spec), rank)
        elif self._rank in holders:
            assert self._direct is not None
            data = self._direct.receive(spec, writer)
            if is_replaced:
                tensor.data = data
            elif any(event.inputs[slot] == -1 - number for slot in writes_beside(event.function, event.call)):
                tensor.data.copy_(data)  # graphs that hold it do not mind, as in one process
            else:
                with torch.no_grad():
                    tensor.copy_(data)

    def _seed(self, number: int) -> None:
        self._seed_draw(self._state.seed, number)

    def _mark(self, event: Event) -> None:
        if event.function is CHECKPOINT_BEGINS:
            self._checkpointed.begin(event)
        elif event.function is GRADIENTS_SWITCHED:
            number, _, value = event.call.args
            set_requires_grad(self._tensors.tensors[number], value)
        elif event.function is CHECKPOINT_ENDS:
            self._checkpointed.end()

    def _operand(self, value: int, event: Event, slot: int, *, is_named: bool) -> Tensor:
        """A value as the operand of an event.

        Args:
            is_named: the event modifies the value in place or asks for its gradient, so it needs the value itself.
        """
        visit, num_parts = event.visit, 1 if self._checkpointed.runs else event.num_gradients(slot)
        home, spec = self.homes[value], self.specs[value]
        returns = self._transfers.gives_gradient(spec)
        if home != visit and (visit, value) not in self._here:
            return self._moved(value, home, visit, spec, self._here.get((home, value)), num_parts)
        if returns and home != visit and not is_named:
            own = self._here.get((home, value))
            there = self._here[visit, value] if self._rank_of(visit) == self._rank else None
            again = self._transfers.repeat(
                value, home, visit, own, there, is_viewed=event.views(slot), num_parts=num_parts
            )
            return _NOTHING if again is None else again
        if returns and home == visit:
            self._transfers.note_use(value, visit)
        return self._here.get((visit, value), _NOTHING)

    def _moved(
        self, value: int, source: int, destination: int, spec: TensorSpec, own: Tensor | None, num_parts: int = 1
    ) -> Tensor:
        """Move a value, or a tensor of the module, from one visit to another that uses it for the first time."""
        moved = self._transfers.move(value, source, destination, spec, own, num_parts=num_parts)
        found = self._here[destination, value] = _NOTHING if moved is None else moved
        return found

    def _module_tensor(self, number: int, event: Event, slot: int) -> Tensor:
        visit = event.visit
        rank = self._rank_of(visit)
        holders = self._holders(number)
        tensor = self._tensors.tensors[number]
        if self._adds_up_by_use(event, slot):
            return self._parameter(number, event, slot)
        if rank in holders:
            return tensor if rank == self._rank else _NOTHING
        found = self._here.get((visit, -1 - number))
        if found is None:
            home = self._placement.index(holders[0])
            own = tensor if self._rank == holders[0] else None
            found = self._moved(-1 - number, home, visit, TensorSpec.of(tensor), own)
        return found

    def _adds_up_by_use(self, event: Event, slot: int) -> bool:
        """Whether gradients of the parameter that an event uses add up one by one, over visits (`repeated_uses`)."""
        spec = event.specs[slot]
        is_itself = event.writes_into(slot) or event.function is torch.autograd.grad
        return (
            self._transfers.gives_gradient(spec)
            and is_differentiable(event)
            and not is_itself
            and spec.num_bytes <= EXACT_BYTES
            and not self._tensors.split_calls
        )

    def _parameter(self, number: int, event: Event, slot: int) -> Tensor:
        """A parameter, which other visits than the first one to use it get as they get a value."""
        value, holders = -1 - number, self._holders(number)
        if value not in self.homes:
            is_here = self._rank_of(event.visit) in holders
            self.homes[value] = event.visit if is_here else self._placement.index(holders[0])
            self.specs[value] = event.specs[slot]
        if self._rank_of(self.homes[value]) == self._rank:
            self._here[self.homes[value], value] = self._tensors.tensors[number]
        return self._operand(value, event, slot, is_named=False)

    def _held(self, tensor: Tensor, holders: Sequence[int], visit: int) -> Tensor:
        """A tensor that a hook made on the ranks `holders`, on the rank of a visit."""
        rank = self._rank_of(visit)
        if rank in holders or self._direct is None:
            return tensor
        if holders[0] == self._rank:
            self._direct.send(conform(tensor, TensorSpec.of(tensor)), rank)
        return self._direct.receive(TensorSpec.of(tensor), holders[0]) if rank == self._rank else tensor


_NOTHING = torch.empty(0, device="meta")
"""Stands for operands on other ranks, whose events this rank does not run."""
