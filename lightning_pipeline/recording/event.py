"""Events: the torch functions that steps have called, as a tree of continuations."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.torch_functions import function_name
from lightning_pipeline.recording.inference import NOTHING, Result
from lightning_pipeline.recording.matcher import Matcher, make_matcher
from lightning_pipeline.recording.operation import Call, shown


def CHECKPOINT_BEGINS(stops_early: bool) -> None:
    """In a path: what follows is computed again in backward."""


def CHECKPOINT_ENDS() -> None:
    """In a path: so much for that."""


def GRADIENTS_SWITCHED(number: int, before: bool, value: bool) -> None:
    """In a path: a tensor of the module requires gradients from here on, or does not any more."""


def MICROBATCHES_MEET(what: str, value: int) -> None:
    """In a path: a step goes on when all micro-batches have come here, where the batch has something done."""


def OWN_CHANGE(*numbers: int) -> None:
    """In a path: the call that follows changes these tensors of the module for all micro-batches."""


def CHANGE_IS_MADE(*numbers: int) -> None:
    """In a path: the first micro-batch makes a call that changes these tensors of the module."""


@dataclass(slots=True, eq=False, repr=False)
class Event:
    """One call of a torch function, after those that came before it.

    Attributes:
        parent: the event before; None for the beginning, which is no call.
        children: what has followed, the latest first.
        function, call: torch's function, and its arguments' templates.
        inputs: of each tensor argument: number of a value, below zero of a module's tensor, or `CAPTURED`.
        state: whether autograd, and inference mode, are on, and autocast.
        takes_gradients: it, or one before it, is a call of `torch.autograd`.
        outputs: of each tensor of the result, the number of the new value; None for an argument.
        writes: of each argument that is written into: its slot, its spec afterwards, the number of its new value.
        visit: where it runs; -1 for marks, which run nowhere.
        draws: it draws random numbers; its first captured number is which draw of the micro-batch it is.
        num_values, num_captured: of the path up to here.
        line: where in the user's code it was first met.
        digest: of the path up to here, alike on all ranks.
        as_part: where micro-batches meet: the program of what has run since they last met, or None.
        sharers: the tensors that share memory with what it writes into (see `view_writes`).
        shortcuts: where calls of whole modules lead from here (see `shortcuts`).
    """

    parent: Event | None
    visit: int
    num_values: int
    num_captured: int
    digest: bytes
    children: list[Event] = field(default_factory=list)
    pool: list[Placeholder] = field(default_factory=list)
    function: Any = None
    call: Call = field(default_factory=lambda: Call((), {}, [], []))
    inputs: tuple[Any, ...] = ()
    specs: tuple[TensorSpec, ...] = ()
    state: tuple[bool, bool, Any] = (True, False, None)
    result: Result = NOTHING
    outputs: tuple[int | None, ...] = ()
    writes: tuple[tuple[int, TensorSpec, int], ...] = ()
    draws: bool = False
    line: str = ""
    takes_gradients: bool = False
    first_captured: int = 0
    program: Any = None
    as_part: Any = None
    shortcuts: dict[Any, Any] | None = None
    sharers: Sequence[Any] = ()
    matcher: Matcher = field(init=False)
    match: Callable[..., Any] = field(init=False)

    @staticmethod
    def beginning(num_values: int, digest: bytes) -> Event:
        """Where paths begin, with so many values that are there before."""
        return Event(None, -1, num_values, 0, digest)

    def followed_by(
        self,
        function: Any,
        call: Call,
        inputs: Sequence[Any],
        specs: Sequence[TensorSpec],
        state: tuple[bool, bool, Any],
        result: Result,
        *,
        visit: int,
        draws: bool,
        line: str,
        module_tensors: Sequence[Tensor],
    ) -> Event:
        values = itertools.count(self.num_values)
        outputs = tuple([None if isinstance(spec, int) else next(values) for spec in result.tensors])
        writes = tuple([(slot, spec, next(values)) for slot, spec in result.writes])
        text = repr((self.digest, function_name(function), shown(call.args), shown(call.kwargs), inputs, specs, state))
        made = Event(
            self,
            visit,
            next(values),
            self.num_captured,
            hashlib.blake2b(text.encode(), digest_size=8).digest(),
            function=function,
            call=call,
            inputs=tuple(inputs),
            specs=tuple(specs),
            state=state,
            result=result,
            outputs=outputs,
            writes=writes,
            draws=draws,
            line=line,
            takes_gradients=self.takes_gradients or function is torch.autograd.grad,
            first_captured=self.num_captured,
        )
        made.matcher = make_matcher(made, module_tensors)
        made.match, made.pool = made.matcher.match, made.matcher.pool
        made.num_captured += made.matcher.num_captured
        call.tensors, call.numbers = [], []
        self.children.insert(0, made)
        return made

    def made(self) -> list[int]:
        """The values that it makes: results, and new contents of what it writes into."""
        return [value for value in self.outputs if value is not None] + [value for _, _, value in self.writes]

    def gives_gradients(self) -> bool:
        """Whether gradients go back through it."""
        specs = [*self.result.tensors, *(spec for _, spec, _ in self.writes)]
        return any(isinstance(spec, TensorSpec) and spec.requires_grad for spec in specs)

    def gives_gradient_to(self, slot: int, wanted: Container[int]) -> bool:
        """Whether gradients of some values go back through it to an operand."""
        if not self.result.unreached:
            return any(value in wanted for value in self.made())
        reached = [value for place, value in enumerate(self.outputs) if (place, slot) not in self.result.unreached]
        reached += [value for _, _, value in self.writes]
        return any(value in wanted for value in reached if value is not None)

    def gives_gradient_of(self, operand: int, wanted: Container[int]) -> bool:
        """Likewise, to where a value or parameter is an operand."""
        return any(self.gives_gradient_to(slot, wanted) for slot, one in enumerate(self.inputs) if one == operand)

    def num_gradients(self, slot: int) -> int:
        """How often gradients go back to an operand."""
        return dict(self.result.repeats).get(slot, 1)

    @property
    def name(self) -> str:
        return function_name(self.function)

    def path(self, after: Event | None = None) -> list[Event]:
        """The events up to here, the first one first: all of them, or those after one."""
        found: list[Event] = []
        event: Event | None = self
        while event is not None and event.parent is not None and event is not after:
            found.append(event)
            event = event.parent
        found.reverse()
        return found

    def writes_into(self, slot: int) -> bool:
        """Whether it modifies an operand in place."""
        return any(written == slot for written, _, _ in self.writes)

    def views(self, slot: int) -> bool:
        """Whether it returns a tensor that shares an operand's memory."""
        return any(slot in shared for shared in self.result.shares)

    def origin(self, value: int) -> int:
        """The earliest value of which a value is a view of all elements; the value itself if it is no view."""
        event: Event | None = self
        while event is not None and event.parent is not None:
            if value in event.outputs:
                index = event.outputs.index(value)
                spec, shares = event.result.tensors[index], event.result.shares[index]
                base = event.inputs[shares[0]] if shares else None
                if isinstance(base, int) and base >= 0 and spec.shape.numel() == event.specs[shares[0]].shape.numel():  # type: ignore[union-attr]
                    value = base
            event = event.parent
        return value


def checkpointed(events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """The outermost checkpointed functions among events: the places where each begins and ends, if it does."""
    depth = begins = 0
    for place, event in enumerate(events):
        if event.function is CHECKPOINT_BEGINS:
            begins = begins if depth else place
            depth += 1
        elif event.function is CHECKPOINT_ENDS:
            depth -= 1
            assert depth >= 0
            if not depth:
                yield begins, place
    if depth:
        yield begins, len(events)
