"""Runs micro-batches one by one, event by event: for steps that read values or return to an earlier stage.

Each event runs on the rank of its visit, when one of its values is read or the step ends. Operands from other visits
are sent there directly. All ranks walk through the same events in the same order, so each knows which
rank sends what to which.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.engine.checkpointed import CheckpointedFunctions
from lightning_pipeline.engine.gradient_hooks import HookCalls
from lightning_pipeline.engine.leaf_gradients import refusing_gradient
from lightning_pipeline.engine.microbatch import ContinuedStep, Microbatch
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.engine.transfers import Transfers, by_leaves
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.memory import begun_at, copied
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.beginnings import Beginnings
from lightning_pipeline.recording.event import CHECKPOINT_BEGINS, CHECKPOINT_ENDS, GRADIENTS_SWITCHED, Event
from lightning_pipeline.recording.execution import run_event, values_made
from lightning_pipeline.recording.inference import writes_beside
from lightning_pipeline.recording.matcher import HookTensor
from lightning_pipeline.recording.module_tensors import set_requires_grad
from lightning_pipeline.recording.operation import Call, put_together
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.recording.repeated_uses import EXACT_BYTES, is_differentiable
from lightning_pipeline.recording.views import Memory
from lightning_pipeline.runtime.tensor_meta import conform


class InOrder:
    """Runs one micro-batch's events.

    Attributes:
        specs, homes: the spec of each value, and the visit that made it.
        here: this rank's tensors, by visit and value.
    """

    def __init__(
        self, state: Microbatch, shared: RankResources, states: Sequence[Microbatch], *, training: bool
    ) -> None:
        self.state = state
        self.placement, self.rank, self.rank_of = shared.placement, shared.rank, shared.rank_of
        self.tensors, self.direct = shared.tensors, shared.direct
        self._shared, self._states, self._holders = shared, states, shared.holders
        specs = state.structure.large
        self.specs: dict[int, TensorSpec] = dict(enumerate(specs))
        self.homes: dict[int, int] = dict.fromkeys(range(len(specs)), 0)
        self.here: dict[tuple[int, int], Tensor] = {}
        self._beginnings = Beginnings(len(specs))
        self.transfers = Transfers(state.index, shared, training=training)
        self._done: Event | None = None
        self._memory = Memory()
        if state.carried is not None:
            self.transfers, self._done = state.carried.transfers, state.carried.event
            before = state.carried.program
            self.specs = {value: spec for value, spec in before.specs.items() if value >= 0}
            self.homes = {value: visit for value, visit in before.homes.items() if value >= 0}
            self.homes.update(state.carried.parameter_homes)
            self.here.update(state.carried.here)
            for event in state.carried.program.events:
                self._memory.note(event)
            self._beginnings = Beginnings(len(specs), before.beginnings)
        self._checkpointed = CheckpointedFunctions(self.seed)
        self._came_frozen: set[tuple[int, int]] = set()  # of `here`, the module's tensors that gave no gradients then
        self._written_again: dict[int, tuple[int, Event]] = {}  # the module's tensors that backward writes into
        if self.rank == self.placement[0]:
            for value, tensor in enumerate(state.given):
                self.here[0, value] = tensor

    def run_up_to(self, end: Event) -> None:
        """Run the events of a path up to `end` that have not run yet."""
        todo, self._done = end.path(self._done), end
        for event in reversed(todo):
            if event.visit < 0 and event.function is GRADIENTS_SWITCHED:
                number, before, _ = event.call.args
                set_requires_grad(self.tensors.tensors[number], before)
        self._checkpointed.note_gradients(todo)
        for event in todo:
            self._run(event)
        assert self.state.recording is not None
        self.state.recording.switched.clear()

    def data_of(self, values: Sequence[int]) -> list[Tensor]:
        """The data of values, on every rank."""
        found = []
        for value in values:
            visit = self.homes[value]
            owner = self.rank_of(visit)
            tensor = self.here[visit, value].detach() if owner == self.rank else None
            if self.direct is not None:
                tensor = self.direct.spread(tensor, self.specs[value], owner)
            assert tensor is not None
            is_own = owner == self.rank
            found.append(copied(tensor) if is_own else begun_at(tensor, self._beginning_of(value)))
        return found

    def _beginning_of(self, value: int) -> int:
        return self._beginnings.of(value, self.state.given_beginnings)

    def data_of_module(self, number: int) -> Tensor:
        """The data of a tensor of the module, on every rank."""
        owner = self._holders(number)[0]
        tensor = self.tensors.tensors[number]
        if self.direct is None:
            return tensor.detach()
        return self.direct.spread(tensor.detach() if owner == self.rank else None, TensorSpec.of(tensor), owner)

    def gradients_of(self, call: Call, values: Mapping[int, int], visit: int) -> tuple[Tensor | None, ...]:
        """What a call of `torch.autograd.grad` over a visit's graph gives, on every rank.

        Args:
            values: by their places in the call; below zero those of the module.
        """
        owner = self.rank_of(visit)
        found: Sequence[Tensor | None] = ()
        if owner == self.rank:
            operands = list(call.tensors)
            for place, value in values.items():
                operands[place] = self._differentiated(value, visit)
            grad = by_leaves({id(operands[place]): self.transfers.leaves(one, visit) for place, one in values.items()})
            args, kwargs = put_together((call.args, call.kwargs), operands, call.numbers)
            found = [None if one is None else one.detach() for one in grad(*args, **kwargs)]
        if self.direct is None:
            return tuple(found)
        if owner == self.rank:
            specs = [None if one is None else TensorSpec.of(one) for one in found]
            self.direct.tell(specs)
        else:
            specs = self.direct.hear(owner, "which gradients a hook takes")
            found = [None] * len(specs)
        return tuple(
            None if spec is None else self.direct.spread(one, spec, owner)
            for one, spec in zip(found, specs, strict=True)
        )

    def _differentiated(self, value: int, visit: int) -> Tensor:
        """A value, or a tensor of the module, as the graph of a visit has it; one that takes no part for another's."""
        own = self.here.get((visit, value))
        if own is None and value < 0 and self.rank in self._holders(-1 - value):
            own = self.tensors.tensors[-1 - value]
        if own is None:
            known = self.specs[value] if value >= 0 else self.tensors.tensors[-1 - value]
            own = torch.empty(0, requires_grad=known.requires_grad)
        return own

    def value(self, value: int) -> Tensor | None:
        """A value's tensor; None if another rank computed it."""
        return self.here.get((self.homes[value], value))

    def let_go(self) -> None:
        self.here.clear()
        self.transfers.let_go()

    def carry_on(self, event: Event, program: Program, values: Container[int]) -> ContinuedStep:
        """The state that the step continues with after a synchronization point.

        Only `values` are kept: graphs hold what they need themselves, and copies of the module's tensors become stale.
        """
        here = {key: tensor for key, tensor in self.here.items() if key[1] in values}
        homes = {value: visit for value, visit in self.homes.items() if value < 0}
        return ContinuedStep(event, program, self.transfers, here, parameter_homes=homes)

    def _run(self, event: Event) -> None:
        visit = event.visit
        if visit < 0:
            self._mark(event)
            return
        is_mine = self.rank_of(visit) == self.rank
        self._checkpointed.note_visit(visit)
        self.transfers.user = event
        operands: list[Tensor] = []
        for slot, value in enumerate(event.inputs):
            if not isinstance(value, int):
                place = event.matcher.captured_tensors[slot]
                recording = self.state.recording
                assert recording is not None
                content = recording.captured[event.first_captured + place]
                if isinstance(content, tuple):
                    content = self._earlier(*content)
                    if event.specs[slot].requires_grad:
                        content = refusing_gradient(content, event.line)
                elif isinstance(value, HookTensor):
                    content = self._held(content, value.ranks, visit)
                operands.append(content)
            elif value < 0:
                operands.append(self._module_tensor(-1 - value, event, slot))
            else:
                is_named = event.writes_into(slot) or event.function is torch.autograd.grad
                operands.append(self._operand(value, event, slot, is_named=is_named))
        if is_mine:
            recording = self.state.recording
            assert recording is not None
            part = self._checkpointed.part_of(visit, recording.captured)
            if part is not None:
                found = part.run(event, operands)
            elif event.function is torch.autograd.grad:
                found = self._differentiate(event, operands, recording)
            else:
                found = run_event(event, operands, recording.captured, self.seed)
            if event.result.repeats and part is None:
                self.transfers.note_made(operands, tree.leaves(found))
            for value, tensor in values_made(event, operands, found):
                self.here[visit, value] = tensor
        elif self.state.recording is not None and event in self.state.recording.with_hooks:
            self._hooks(event, self.state.recording).listen(self.rank_of(visit))
        for spec, value in (*zip(event.result.tensors, event.outputs, strict=True), *(w[1:] for w in event.writes)):
            if value is not None:
                assert isinstance(spec, TensorSpec)
                self.specs[value], self.homes[value] = spec, visit
        self._beginnings.note(event)
        for number, is_replaced in self._memory.note(event).items():
            self._note_written_again(number, visit, event)
            self._share_write(number, visit, event, is_replaced=is_replaced)

    def _differentiate(self, event: Event, operands: Sequence[Tensor], recording: Recording) -> Any:
        leaves = {
            id(tensor): self.transfers.leaves(value, event.visit)
            for value, tensor in zip(event.inputs, operands, strict=True)
            if type(value) is int
        }
        with self._hooks(event, recording).told() if event in recording.with_hooks else nullcontext():
            return run_event(event, operands, recording.captured, self.seed, by_leaves(leaves))

    def _hooks(self, event: Event, recording: Recording) -> HookCalls:
        keeps_graph = bool(event.call.kwargs.get("create_graph"))
        return HookCalls(recording, self, keeps_graph=keeps_graph)

    def _note_written_again(self, number: int, visit: int, event: Event) -> None:
        """Note a write into the module that backward repeats, as it recomputes the function that makes it.

        Raises:
            NotImplementedError: another visit writes into the same tensor, of which one of the two has only a copy.
        """
        is_repeated = self._checkpointed.runs and not self._checkpointed.is_kept
        before, _ = self._written_again.get(number, (visit, event))
        if before != visit:
            ranks = {self.rank_of(before)} | ({self.rank_of(visit)} if is_repeated else set())
            if len(ranks) > 1 or not ranks <= {*self._holders(number)}:
                raise NotImplementedError(
                    f"{self.tensors.names[number][0]} is written into by a checkpointed function, which backward runs "
                    f"again, and on another stage ({event.line}): do without the checkpoint, or let one stage hold both"
                )
        if is_repeated:
            self._written_again[number] = visit, event

    def share_writes_of_backward(self) -> None:
        """Copy the module's tensors that backward wrote into, as it ran checkpointed functions again."""
        for number, (visit, event) in self._written_again.items():
            self._share_write(number, visit, event, is_replaced=False)
        self._written_again.clear()

    def _share_write(self, number: int, visit: int, event: Event, *, is_replaced: bool) -> None:
        """Copy a tensor of the module that an event modified on one rank to the other ranks that hold it."""
        writer = self.rank_of(visit)
        spec = next((spec for slot, spec, _ in event.writes if event.inputs[slot] == -1 - number), None)
        tensor = self.tensors.tensors[number]
        spec = spec or TensorSpec.of(tensor)
        for key in [key for key in self.here if key[1] == -1 - number and key[0] != visit]:
            del self.here[key]
        holders = self._holders(number)
        if writer == self.rank:
            own = tensor if writer in holders else self.here[visit, -1 - number]
            for rank in holders:
                if rank != writer:
                    assert self.direct is not None
                    self.direct.send(conform(own.detach(), spec), rank)
        elif self.rank in holders:
            assert self.direct is not None
            data = self.direct.receive(spec, writer)
            if is_replaced:
                tensor.data = data
            elif any(event.inputs[slot] == -1 - number for slot in writes_beside(event.function, event.call)):
                tensor.data.copy_(data)  # graphs that hold it do not mind, as in one process
            else:
                with torch.no_grad():
                    tensor.copy_(data)

    def seed(self, number: int) -> None:
        self._shared.draws.seed(self.state.seed, number)

    def _earlier(self, recording: Recording, value: int) -> Tensor:
        """The data of an earlier micro-batch's value, on every rank; all ranks call it."""
        return self._shared.spread_kept(next(one for one in self._states if one.recording is recording), value)

    def _mark(self, event: Event) -> None:
        if event.function is CHECKPOINT_BEGINS:
            self._checkpointed.begin(event)
        elif event.function is GRADIENTS_SWITCHED:
            number, _, value = event.call.args
            set_requires_grad(self.tensors.tensors[number], value)
        elif event.function is CHECKPOINT_ENDS:
            self._checkpointed.end()

    def _operand(self, value: int, event: Event, slot: int, *, is_named: bool) -> Tensor:
        """A value as the operand of an event.

        Args:
            is_named: the event modifies the value in place or asks for its gradient, so it needs the value itself.
        """
        visit, num_parts = event.visit, 1 if self._checkpointed.runs else event.num_gradients(slot)
        home, spec = self.homes[value], self.specs[value]
        returns = self.transfers.gives_gradient(spec)
        if home != visit and (visit, value) not in self.here:
            return self._moved(value, home, visit, spec, self.here.get((home, value)), num_parts)
        if returns and home != visit and not is_named:
            own = self.here.get((home, value))
            there = self.here[visit, value] if self.rank_of(visit) == self.rank else None
            again = self.transfers.repeat(
                value, home, visit, own, there, is_viewed=event.views(slot), num_parts=num_parts
            )
            return _NOTHING if again is None else again
        if returns and home == visit:
            self.transfers.note_use(value, visit)
        elif returns:
            self.transfers.note_another_user(value, visit)
        return self.here.get((visit, value), _NOTHING)

    def _moved(
        self, value: int, source: int, destination: int, spec: TensorSpec, own: Tensor | None, num_parts: int = 1
    ) -> Tensor:
        """Move a value, or a tensor of the module, from one visit to another that uses it for the first time."""
        begin = self._beginning_of(value)
        moved = self.transfers.move(value, source, destination, spec, own, num_parts=num_parts, begin=begin)
        found = self.here[destination, value] = _NOTHING if moved is None else moved
        return found

    def _module_tensor(self, number: int, event: Event, slot: int) -> Tensor:
        visit = event.visit
        rank = self.rank_of(visit)
        holders = self._holders(number)
        tensor = self.tensors.tensors[number]
        if self._adds_up_by_use(event, slot):
            return self._parameter(number, event, slot)
        if rank in holders:
            return tensor if rank == self.rank else _NOTHING
        key, spec = (visit, -1 - number), event.specs[slot]
        if key not in self.here or (spec.requires_grad and key in self._came_frozen):
            home = self.placement.index(holders[0])
            own = tensor if self.rank == holders[0] else None
            if spec.requires_grad:
                self._came_frozen.discard(key)
            else:
                self._came_frozen.add(key)
            self._moved(-1 - number, home, visit, spec, own)
        else:
            self.transfers.note_another_user(-1 - number, visit)
        found = self.here[key]
        is_frozen = found.requires_grad and not spec.requires_grad  # by the step, since it came
        return found.detach() if is_frozen else found

    def _adds_up_by_use(self, event: Event, slot: int) -> bool:
        """Whether gradients of the parameter that an event uses add up one by one, over visits (`repeated_uses`)."""
        spec = event.specs[slot]
        is_itself = event.writes_into(slot) or event.function is torch.autograd.grad
        return (
            self.transfers.gives_gradient(spec)
            and is_differentiable(event)
            and not is_itself
            and spec.num_bytes <= EXACT_BYTES
            and not self.tensors.split_calls
        )

    def _parameter(self, number: int, event: Event, slot: int) -> Tensor:
        """A parameter, which other visits than the first one to use it get as they get a value."""
        value, holders = -1 - number, self._holders(number)
        if value not in self.homes:
            is_here = self.rank_of(event.visit) in holders
            self.homes[value] = event.visit if is_here else self.placement.index(holders[0])
        self.specs[value] = event.specs[slot]
        if self.rank_of(self.homes[value]) == self.rank:
            self.here[self.homes[value], value] = self.tensors.tensors[number]
        return self._operand(value, event, slot, is_named=False)

    def _held(self, tensor: Tensor, holders: Sequence[int], visit: int) -> Tensor:
        """A tensor that a hook made on the ranks `holders`, on the rank of a visit."""
        rank = self.rank_of(visit)
        if rank in holders or self.direct is None:
            return tensor
        if holders[0] == self.rank:
            self.direct.send(conform(tensor, TensorSpec.of(tensor)), rank)
        return self.direct.receive(TensorSpec.of(tensor), holders[0]) if rank == self.rank else tensor


_NOTHING = torch.empty(0, device="meta")
"""Stands for operands on other ranks, whose events this rank does not run."""
