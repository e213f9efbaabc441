"""Backward of a micro-batch that ran event by event: visit by visit, from the last one to the first.

Gradients of values return to the visit that made them. Parameters that several visits use are passed on from each of
these to the one before, so that autograd adds their gradients in the order in which one process would:

    visit 2 ── uses w ──┐ gradient of w
    visit 1 ── uses w ◄─┘─┐ gradients of both uses, added one by one
    visit 0 ── holds w ◄──┘──► w.grad

Where a visit uses it after a later one has, no order of visits gives that: what comes of each use is kept, and added up
at the end (`_added_at_the_end`).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Container, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.engine.gradient_hooks import HookCalls
from lightning_pipeline.engine.in_order import InOrder
from lightning_pipeline.engine.transfers import Use
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.backward_calls import backward_from, parts_kept_back
from lightning_pipeline.recording.program import Program


@dataclass(frozen=True)
class RepeatedlyUsed:
    """A parameter of this rank that several visits use.

    Attributes:
        visits: those of this rank.
    """

    number: int
    parameter: Tensor
    visits: set[int]


def run_backward(run: InOrder, program: Program, work: StepTask, *, retain_graph: bool = False) -> None:
    """Run backward from the loss of a micro-batch that ran in order. All ranks must call it."""
    _Backward(run, program, work, retain_graph=retain_graph).run_all()


class _Backward:
    def __init__(self, run: InOrder, program: Program, work: StepTask, *, retain_graph: bool) -> None:
        assert run.state.recording is not None
        self._run = run
        self._program = program
        self._work = work
        self._retain_graph = retain_graph
        self._hooks = HookCalls(run.state.recording, run)
        self._wanted = wanted = program.with_gradients(run.state.loss_value)
        self._hooked = self._visits_of_hooked(wanted)
        # A hook would see zeros from visits that the loss does not depend on.
        self._transfers = [
            one for one in run.transfers.returning(wanted) if self._is_for(-1 - one.value, one.destination)
        ]
        self._gradients: dict[int, list[Tensor]] = {}  # by the number of the transfer
        self._at_the_end: dict[int, list[Use]] = {}
        self._own_parts: dict[int, list[Tensor]] = {}  # of those, by the number of the parameter

    def run_all(self) -> None:
        run, state = self._run, self._run.state
        assert state.recording is not None
        state.let_age()
        run.transfers.merge(self._transfers)
        repeated = self._used_repeatedly()
        self._at_the_end = self._added_at_the_end(repeated)
        # Sum this micro-batch's gradients apart from earlier ones': floating-point addition is not associative.
        before = [(one.parameter, one.parameter.grad) for one in repeated]
        for one in repeated:
            one.parameter.grad = None
        # Every rank loops over all visits, as gradients and hook calls travel between any two of them.
        for visit in range(max(run.homes.values(), default=0), -1, -1):
            self._run_visit(visit, repeated)
            self._give_back(visit, repeated)
        self._add_at_the_end()
        run.transfers.end_backward(self._transfers, self._wanted, is_repeated=self._retain_graph)
        run.share_writes_of_backward()
        for parameter, gradient in before:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        for stage in reversed(range(len(run.placement))):
            if run.placement[stage] == run.rank:
                self._work.after_backward(stage, state)
        state.gradients = [(place, self._retained(value)) for value, place in state.recording.retained]

    def _used_repeatedly(self) -> list[RepeatedlyUsed]:
        """In one process, autograd sums a micro-batch's uses of a parameter before it adds them to ``.grad``."""
        run = self._run
        visits: dict[int, set[int]] = {}
        for event in self._program.events:
            for value in event.inputs:
                if type(value) is int and value < 0 and event.visit >= 0:
                    visits.setdefault(-1 - value, {run.homes.get(value, event.visit)}).add(event.visit)
        tensors = run.tensors.tensors
        return [
            RepeatedlyUsed(number, tensors[number], {visit for visit in users if run.rank_of(visit) == run.rank})
            for number, users in visits.items()
            if len(users) > 1
            and run.rank in map(run.rank_of, users)
            and tensors[number].is_leaf
            and tensors[number].requires_grad
        ]

    def _added_at_the_end(self, repeated: Sequence[RepeatedlyUsed]) -> dict[int, list[Use]]:
        """The parameters that this rank gives to other visits, some of which use them after later ones, with their
        uses."""
        run = self._run
        found = {}
        for one in repeated:
            value = -1 - one.number
            if run.rank_of(run.homes.get(value, 0)) == run.rank and one.number not in self._hooked:
                uses = run.transfers.uses(value, self._wanted)
                visits = [use.visit for use in uses]
                if len(uses) > 2 and visits != sorted(visits):
                    found[one.number] = uses
        return found

    def _add_at_the_end(self) -> None:
        """Add up what has come of the uses of such parameters, the last one's first."""
        index_of = {id(one): index for index, one in enumerate(self._transfers)}
        for number, uses in self._at_the_end.items():
            value, own = -1 - number, iter(self._own_parts.get(number, ()))
            parts: list[Tensor] = []
            for use in reversed(uses):
                if use.transfer is not None:
                    parts += self._gradients.get(index_of[id(use.transfer)], ())
                elif use.user is not None:
                    slots = (slot for slot, operand in enumerate(use.user.inputs) if operand == value)
                    parts += itertools.islice(own, use.user.num_gradients(next(slots)))
            parts += own
            if parts:
                parameter = self._run.tensors.tensors[number]
                backward_from([torch.ops.aten.alias.default(parameter)], [functools.reduce(operator.add, parts)])

    def _visits_of_hooked(self, wanted: Container[int]) -> dict[int, int]:
        """The visit that uses each parameter with a hook for a wanted value, by the parameter's number.

        Raises:
            NotImplementedError: several visits use one: its hook would see parts of the gradient.
        """
        found: dict[int, int] = {}
        for number in self._hooks.parameters:
            users = (event for event in self._program.events if -1 - number in event.inputs)
            for visit in {event.visit for event in users if any(value in wanted for value in event.made())}:
                if found.setdefault(number, visit) != visit:
                    raise NotImplementedError(
                        f"{self._run.tensors.names[number][0]} has a hook on its gradient, and takes part on several "
                        f"stages or several times on one: use its gradient in on_after_backward"
                    )
        return found

    def _is_for(self, number: int, visit: int) -> bool:
        """Whether a visit may give gradients of the parameter `number`."""
        return self._hooked.get(number, visit) == visit

    def _run_visit(self, visit: int, repeated: Sequence[RepeatedlyUsed]) -> None:
        run, hooks = self._run, self._hooks
        is_mine = run.rank_of(visit) == run.rank
        if not is_mine:
            if hooks.are_there:
                hooks.listen(run.rank_of(visit))
            return
        with hooks.told() if hooks.are_there else nullcontext():
            self._run_own_visit(
                visit, [one.parameter for one in repeated if visit in one.visits and self._is_for(one.number, visit)]
            )

    def _run_own_visit(self, visit: int, continued: Sequence[Tensor]) -> None:
        """Run backward on a visit of this rank.

        Args:
            continued: parameters whose gradient from later visits is passed in as a root, so that autograd adds this
                visit's uses to it one by one.
        """
        run, state = self._run, self._run.state
        roots: list[Any] = []
        given: list[Tensor] = []
        for index, one in reversed(list(enumerate(self._transfers))):
            if one.source != visit or -1 - one.value in self._at_the_end:
                continue
            if one.sent and self._gradients.get(index):
                roots += one.sent[::-1]
                given += self._gradients[index]
        if run.homes.get(state.loss_value) == visit:
            loss = run.here[visit, state.loss_value]
            assert self._work.loss_of is not None
            weighted = self._work.loss_of(state, loss)
            if roots or self._kept_back(visit):
                roots.append(weighted)
                given.append(torch.ones_like(weighted))
            elif self._retain_graph:
                self._work.run_backward(weighted, retain_graph=True)
            else:
                self._work.run_backward(weighted)
        if roots:
            self._continue_apart(visit, roots, given, continued)

    def _kept_back(self, visit: int) -> list[int]:
        """The numbers of parameters that a visit gives to others, and that are added up at the end."""
        return [number for number in self._at_the_end if self._run.homes.get(-1 - number) == visit]

    def _continue_apart(self, visit: int, roots: list[Any], given: list[Tensor], continued: Sequence[Tensor]) -> None:
        """`_continue` on a visit, but keep back what it adds to parameters that are added up at the end."""
        numbers = self._kept_back(visit)
        if not numbers:
            self._continue(roots, given, continued)
            return
        parameters = [self._run.tensors.tensors[number] for number in numbers]
        others = [one for one in continued if not any(one is parameter for parameter in parameters)]
        with parts_kept_back(parameters, roots) as parts:
            self._continue(roots, given, others)
        self._own_parts.update(zip(numbers, parts, strict=True))

    def _continue(self, roots: list[Any], given: list[Tensor], continued: Sequence[Tensor]) -> None:
        """Run backward from roots, with the gradients that parameters have so far as further ones."""
        for parameter in continued:
            if parameter.grad is not None:
                roots.append(torch.ops.aten.alias.default(parameter))  # the newest node, which autograd runs first
                given.append(parameter.grad)
                parameter.grad = None
        backward_from(roots, given, retain_graph=self._retain_graph)

    def _give_back(self, visit: int, repeated: Sequence[RepeatedlyUsed]) -> None:
        """Send the gradients of what a visit was sent to where that came from."""
        run = self._run
        for index, one in reversed(list(enumerate(self._transfers))):
            if one.destination != visit:
                continue
            spec = run.specs[one.value] if one.value >= 0 else TensorSpec.of(run.tensors.tensors[-1 - one.value])
            given = self._gradients[index] = run.transfers.give_back(one, spec)
            is_late = one.source > visit and -1 - one.value not in self._at_the_end
            if is_late and given:  # a parameter's: the source's turn is over
                own = [used.parameter for used in repeated if used.number == -1 - one.value]
                self._continue([*one.sent[::-1]], given, own)

    def _retained(self, value: int) -> Tensor | None:
        """The gradient of a value on which `retain_grad` was called, on every rank."""
        run = self._run
        home = run.homes[value]
        owner = run.rank_of(home)
        own = run.here[home, value].grad if owner == run.rank else None
        if run.direct is None:
            return own
        if owner == run.rank:
            run.direct.tell(own is not None)
        elif not run.direct.hear(owner, "a retained gradient"):
            return None
        return None if owner == run.rank and own is None else run.direct.spread(own, run.specs[value], owner)
