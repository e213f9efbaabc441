"""Running the user's step for one micro-batch, up to the end of this stage.

Before the stage begins, every event is answered from the record: nothing is computed, absent tensors come back. With
the call of the stage's first module, the absent tensors that were received turn into data, and from there on the step
runs as it always does, on plain tensors. The call that reaches the next stage's first module ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.absent import Absent, ValueId
from lightning_pipeline.partition.answers import Answers
from lightning_pipeline.partition.crossing import Crossing, Kept
from lightning_pipeline.partition.hooks import HookCall
from lightning_pipeline.partition.leaves import Leaf
from lightning_pipeline.partition.metadata import METADATA, PRINTED, function_name, users_line
from lightning_pipeline.partition.native import checkpointed, grad_within_stage, pop_mode, push_mode, run_without
from lightning_pipeline.partition.observer import Observer
from lightning_pipeline.partition.outcome import DivergenceError, Outcome, StageEnd
from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.received import Received
from lightning_pipeline.partition.record import Record
from lightning_pipeline.partition.stage_config import is_stateless, runs_anywhere

BATCH = -1
"""The event number of the batch's tensors."""


class Replay(TorchFunctionMode):
    """One micro-batch's run of the step on one stage.

    Args:
        stage: this stage.
        num_stages: the number of stages.
        record: the events before this stage and, unless an observer is given, those of this stage.
        received: the values of earlier stages.
        batch: the tensors of the micro-batch, absent ones where they were not delivered.
        crossing: the values that go to the next stage; not asked for with an observer.
        observer: notes this stage's events (the first time a structure is seen); None where they are known.
        modules: the modules inside leaves, by name.
        term: what error messages call a stage.
    """

    def __init__(
        self,
        *,
        stage: int,
        num_stages: int,
        device: torch.device,
        streams: Streams,
        record: Record,
        received: Received,
        batch: list[Tensor],
        crossing: Crossing | None,
        observer: Observer | None = None,
        modules: dict[str, nn.Module],
        term: str = "stage",
    ) -> None:
        super().__init__()
        self.stage = stage
        self.last = stage == num_stages - 1
        self._num_stages = num_stages
        self._term = term
        self._passed = ""
        self.at = 0
        self._opened_by: Leaf | None = None
        self.number = 0
        self.inside = False
        self.checkpointed = 0
        self._in_function = False
        self._free = False
        self._on_stack = False
        self._streams = streams
        self._events = record.events
        self._start = record.starts.get(stage, 0)
        self._record = record
        self._received = received
        self._observer = observer
        places = {(BATCH, index): tensor for index, tensor in enumerate(batch)}
        self._answers = Answers(places, modules, device)
        self.replaced = self._answers.replaced
        """Attributes of leaves that were set for events of earlier stages, with their former values."""
        self._crossing = crossing
        self._kept: Kept = {}
        self._alive: dict[ValueId, Tensor] = {}
        self._at_leaf = "the start of the step"

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self, step: Callable[..., Any], *args: Any) -> Outcome:
        """Run ``step(*args)`` up to the end of this stage.

        Raises:
            ValueError: the data flows to a lower stage.
            DivergenceError: the events are not those of the record.
        """
        result = None
        if self.stage == 0:
            self._begin("the step")
        self._on_stack = not self._free
        if self._on_stack:
            push_mode(self)
        try:
            result = step(*args)
            self._go_to(self._num_stages - 1, None)
        except StageEnd:
            result = None
        finally:
            if self._on_stack:
                pop_mode()
        if self._observer is not None:
            if self.last:
                self.uses(result)
                self._observer.alive()
            return Outcome(result, self._alive, self._passed)
        try:
            outputs = self._crossing.outputs(self._kept) if self._crossing is not None else {}
        except KeyError as error:
            self._ended_before(error.args[0])
        return Outcome(result, outputs, self._passed)

    def call(self, leaf: Leaf, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a leaf module."""
        stage = leaf.stage_when_called(self.at)
        if stage != self.at:
            self._move(leaf, stage)
        self._at_leaf = leaf.name
        if self.at < self.stage:
            return self._absent(name, None, args, kwargs)
        if self._free:
            return function(*args, **kwargs)
        if self.checkpointed and torch.is_grad_enabled():
            return self._own(name, checkpointed(function), args, kwargs, leaf.module)
        return self._own(name, function, args, kwargs, leaf.module)

    def function(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of an autograd.Function between modules."""
        if self.at < self.stage:
            return self._absent(name, None, args, kwargs)
        self._in_function = True
        try:
            return self._own(name, function, args, kwargs, None)
        finally:
            self._in_function = False

    def nested_call(self, leaf: Leaf) -> None:
        """A leaf called while another event runs natively."""
        if self._in_function and leaf.stage is not None and leaf.stage != self.at:
            raise ValueError(
                f"the boundary {leaf.name!r} (stage {leaf.stage}) is called inside an autograd.Function that runs on "
                f"stage {self.at}, and such a function cannot be cut; move the boundary outside of it ({users_line()})"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            return func(*args, **(kwargs or {}))
        name = function_name(func)
        if func is torch.autograd.grad:
            func = grad_within_stage
        if name in PRINTED:
            return Absent.__repr__(args[0]) if isinstance(args[0], Absent) else func(*args, **(kwargs or {}))
        if self.at < self.stage:
            return self._absent(name, func, args, kwargs or {})
        if self._observer is not None:
            return self._own(name, func, args, kwargs or {}, None)
        number = self._next(name)
        result = func(*args, **(kwargs or {}))
        if self._crossing is not None and number in self._crossing:
            self._crossing.keep(self._kept, number, result, args, kwargs or {})
        return result

    def uses(self, value: Any) -> None:
        """Note that this stage used the tensors in `value` other than by an event (logged, or returned)."""
        if self._observer is not None:
            with torch._C.DisableTorchFunction():
                self._observer.use(tree.leaves(value))

    @property
    def own(self) -> bool:
        """Whether the step is in this stage now."""
        return self.at == self.stage

    # -- stages -----------------------------------------------------------------------------------------------------

    def _move(self, leaf: Leaf, stage: int) -> None:
        if stage < self.at:
            way_out = (
                f"stages follow the data, so give it {self.at} or higher, or move the cut; a module that is called "
                f"twice in a step is called once, on its inputs put together"
            )
            for cause in (leaf, self._opened_by):  # the data may also have come here too soon
                if cause is not None and cause.has_key and is_stateless(cause.module):
                    way_out = runs_anywhere(cause.name, cause.module)
                    break
            raise ValueError(
                f"{self._term}s are out of order: {leaf.name!r} is on {self._term} {stage} and is called after "
                f"{self._at_leaf!r} of {self._term} {self.at}; {way_out} ({users_line()})"
            )
        self._opened_by = leaf
        self._go_to(stage, leaf.name)

    def _go_to(self, stage: int, leaf: str | None) -> None:
        """Go on to `stage`, past those before it, for a call of `leaf`, or (None) for the end of the step."""
        came_from = self.at
        while self.at < stage:
            if self.at == self.stage:
                if self._observer is not None:  # before the user's frames, and what they hold, are gone
                    with torch._C.DisableTorchFunction():
                        self._alive = self._observer.alive()
                raise StageEnd
            self.at += 1
            if self.at == self.stage:
                if leaf is None:
                    self._passed = f"the step returned on {self._term} {came_from}, after {self._at_leaf!r}"
                elif self.at < stage:
                    went = f"from {self._term} {came_from} ({self._at_leaf!r}) to {leaf!r} on {self._term} {stage}"
                    self._passed = f"the data goes {went}"
                self._begin("the end of the step" if leaf is None else f"the call of {leaf!r}")

    def _begin(self, what: str) -> None:
        """The stage begins, with `what`: what was received takes the places of the absent tensors."""
        if self._observer is None and self._start != self.number:
            self._diverged(self.number, what)
        places = self._answers.places
        with torch._C.DisableTorchFunction():
            self._received.take_places(places)
        if self.stage > 0:
            self._streams.counts.update(self._record.counts)
        if self._observer is not None:
            self._observer.begin(self.number, places)
        else:
            if self._crossing is not None:
                self._crossing.pass_through(self._kept, places)
            if self.last and not self.checkpointed:
                self._set_free()
        places.clear()  # or the stage's inputs would outlive their use

    def _set_free(self) -> None:
        """Leave the rest of the step alone: nobody after the last stage has to know what it does."""
        if self._on_stack:
            top = pop_mode()
            if top is not self:  # the user's code has put a mode of its own on top of this one
                push_mode(top)
                return
            self._on_stack = False
        self._free = self.inside = True

    # -- events -----------------------------------------------------------------------------------------------------

    def _own(self, name: str, function: Any, args: Any, kwargs: Any, module: nn.Module | None) -> Any:
        if self._observer is None:
            number = self._next(name)
            if self._crossing is None or number not in self._crossing:
                return self._run_native(function, args, kwargs)
            calls: list[HookCall] = []
            handles = self._crossing.watch(number, calls)
            try:
                result = self._run_native(function, args, kwargs)
            finally:
                for handle in handles:
                    handle.remove()
            self._crossing.keep(self._kept, number, result, args, kwargs, calls)
            return result
        number = self.number
        self.number = number + 1
        with torch._C.DisableTorchFunction():
            look = self._observer.before(name, args, kwargs, module)
        try:
            result = self._run_native(function, args, kwargs)
        except BaseException:
            self._observer.abandon(look)
            raise
        with torch._C.DisableTorchFunction():
            self._observer.after(look, number, result)
        return result

    def _absent(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of an event of an earlier stage."""
        number = self._next(name)
        with torch._C.DisableTorchFunction():
            return self._answers.answer(number, self._events[number], function, args, kwargs)

    def _run_native(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call `function` without this mode, and leave alone what it calls."""
        self.inside = True
        try:
            return run_without(self, function, args, kwargs)
        finally:
            self.inside = False

    def _next(self, name: str) -> int:
        """The number of the event that comes next. Nobody after the last stage has to know what it does."""
        number = self.number
        self.number = number + 1
        if self.at < self._num_stages - 1 and (number >= len(self._events) or self._events[number].name != name):
            self._diverged(number, name)
        return number

    def _ended_before(self, value: ValueId) -> NoReturn:
        raise DivergenceError(
            f"the step ended after {self._at_leaf!r}, before {self._events[value[0]].name!r}, whose result went to the "
            f"next stage when this structure of micro-batch was first seen; it must run the same way for every "
            f"micro-batch of one structure: to skip a batch, return a loss of zero times the output"
        ) from None

    def _diverged(self, number: int, name: str) -> None:
        expected = self._events[number].name if number < len(self._events) else "the end of the step"
        raise DivergenceError(
            f"event {number} of the step is {name!r} and was {expected!r} when this structure of micro-batch was first "
            f"seen; the code between modules must run the same way on every stage and for every micro-batch of one "
            f"structure, so let it depend on neither rank nor counters ({users_line()})"
        )
