"""The Python of checkpointed functions, which one process runs again in backward.

Stages compute a checkpointed function's events again, without its Python. Where that has changed something (a counter,
a list, a generator), every rank runs it once more on placeholders, when and as far as one process would::

    forward    run(x)   self.calls 0 -> 1    linear, tanh, dropout       events
    backward   run(x)   self.calls 1 -> 2    linear, tanh, dropout       the same: the values that are there already

A function that then computes otherwise has no gradient that stages could come to: an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.gradient_hooks import Handle, Hook
from lightning_pipeline.partition.placeholder import Placeholder, describe
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, kind_of
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording import process_flags
from lightning_pipeline.recording.autograd_calls import Graph, made_of_fakes
from lightning_pipeline.recording.event import CHECKPOINT_BEGINS, Event, checkpointed
from lightning_pipeline.recording.everywhere import compute_everywhere
from lightning_pipeline.recording.execution import autocast_as
from lightning_pipeline.recording.matcher import UNLIKE
from lightning_pipeline.recording.provenance import is_same
from lightning_pipeline.recording.reachable_state import Look
from lightning_pipeline.recording.reading import read
from lightning_pipeline.recording.second_runs import refuse_second_runs

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


@dataclass(frozen=True, eq=False, slots=True)
class CheckpointCall:
    """A call of a checkpointed function.

    Attributes:
        stops_early: computing it again may stop when all is there.
        around: entered around the function when it runs again.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stops_early: bool
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)


@dataclass(frozen=True, eq=False, slots=True)
class ChangingCall:
    """A call that has changed something of Python.

    Attributes:
        begins, ends: the marks around its events.
        is_deep: whether a checkpointed function within it has changed something.
    """

    call: CheckpointCall
    begins: Event
    ends: Event
    first_draw: int
    autocast: Any
    changed: list[str]
    line: str
    is_deep: bool

    def events(self) -> list[Event]:
        """What it has called, in order."""
        assert self.ends.parent is not None
        return self.ends.parent.path(self.begins)


def run_again(recording: Recording, loss: Any, *, is_last: bool = True) -> None:
    """Run the functions again that a backward from `loss` runs again in one process, in its order.

    Args:
        is_last: the graph is freed, so that no other backward runs them again.

    Raises:
        CheckpointError: one computes otherwise than before.
    """
    value = recording.value_of(loss)
    if value is not None and (recording.event.takes_gradients or recording.has_run_backward):
        refuse_second_runs(recording, value)
    if value is None or not recording.checkpoints.changing_calls:
        return
    graph = Graph(recording.event, recording.captured, [value])
    for one in reversed([*recording.checkpoints.changing_calls]):
        events = one.events()
        last = _last_saving(recording, one, events, graph)
        if last is None:
            continue
        if is_last:
            recording.checkpoints.changing_calls.remove(one)
        if not one.is_deep:
            _Again(recording, one, events, last).run()
        elif changed := _changed_again(recording, one, events):
            raise CheckpointError(
                f"a checkpointed function within another one, called at {one.line}, changes {changed[0]}, as often as "
                f"torch comes to run both again in backward: change it outside of them, or checkpoint one of the two"
            )


def _changed_again(recording: Recording, one: ChangingCall, events: Sequence[Event]) -> list[str]:
    """What changes if a function runs once more to its end; nothing where it only keeps what it computes."""
    look = Look(recording.recorder.places, one.call.function, (*one.call.args, *one.call.kwargs.values()))
    _Again(recording, one, events, len(events)).run()
    return look.changed()


def refuse_with_gradients(recording: Recording, begins: Event, changed: Sequence[str]) -> None:
    """Refuse a checkpointed function that takes gradients, and does more than compute: in one process it runs again
    there, too.
    """
    line, recording.checkpoints.gradients_taken_at = recording.checkpoints.gradients_taken_at, ""
    written = list(changed)
    for event in reversed(recording.event.path(begins)):
        for slot, _, _ in event.writes:
            if type(value := event.inputs[slot]) is int and value < 0:
                written.append(recording.tensors.names[-1 - value][0])
    if written:
        raise CheckpointError(
            f"a checkpointed function takes gradients by torch.autograd.grad ({line}), for which it runs again, and "
            f"changes {written[0]} each time: take the gradients, or change that, outside of the function"
        )


def _last_saving(recording: Recording, one: ChangingCall, events: Sequence[Event], graph: Graph) -> int | None:
    """The place of the event after which torch stops to run a function again, the number of events for never; None if
    it does not run again."""
    outer = _outermost(events)
    reached = {outer[place] for place in graph.leading(events)}
    if not one.call.stops_early:
        return len(events) if reached else None
    saving = _saving(recording, events, outer) if reached else set()
    return None if saving.isdisjoint(reached) else max(saving)


def _outermost(events: Sequence[Event]) -> list[int]:
    """For each event its place, or that of the beginning of the checkpointed function that it is in."""
    found = list(range(len(events)))
    for begins, ends in checkpointed(events):
        found[begins : ends + 1] = [begins] * (ends + 1 - begins)
    return found


def _saving(recording: Recording, events: Sequence[Event], outer: Sequence[int]) -> set[int]:
    """The places of events that save tensors for backward, found out on fake ones. A checkpointed function within saves
    what it is given."""
    inference, captured = recording.recorder.inference, recording.captured
    fakes: dict[int, Tensor] = {}
    found: set[int] = set()
    place = 0

    def pack(tensor: Tensor) -> Tensor:
        found.add(place)
        return tensor

    with _torch.function_modes_taken_off(), inference.mode:
        for place, event in enumerate(events):
            if outer[place] != place or event.function is CHECKPOINT_BEGINS:
                found.add(outer[place])
            if event.visit < 0:
                continue
            operands = []
            for value, spec in zip(event.inputs, event.specs, strict=True):
                known = fakes.get(value) if type(value) is int else None
                operands.append(inference.fake(spec) if known is None else known)
                if type(value) is int:
                    fakes[value] = operands[-1]
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                fakes.update(made_of_fakes(event, operands, captured, inference))
    return found


class _Stopped(BaseException):
    """Ends a function that runs again. No Exception, so that no handler of the user's catches it."""


class _Again(TorchFunctionMode):
    """Runs a function again, with the results that its calls had.

    Args:
        last: the place of the event that is the last one.
    """

    def __init__(self, recording: Recording, one: ChangingCall, events: Sequence[Event], last: int) -> None:
        super().__init__()
        self._recording, self._one, self._events, self._last = recording, one, events, last
        self._place = 0

    def run(self) -> None:
        recording, call = self._recording, self._one.call
        draws, recording.num_draws = recording.num_draws, self._one.first_draw
        aside, recording.replay = recording.num_aside, self
        was_on = torch.is_grad_enabled()
        try:
            with ExitStack() as stack:
                _torch.set_grad_enabled(True)
                stack.enter_context(autocast_as(self._one.autocast))
                stack.enter_context(self)
                stack.enter_context(call.around)
                call.function(*call.args, **call.kwargs)
        except _Stopped:
            pass
        finally:
            _torch.set_grad_enabled(was_on)
            recording.num_draws, recording.num_aside, recording.replay = draws, aside, None

    def enter_checkpoint(self) -> None:
        """A checkpointed function within begins."""
        while self._place < len(self._events):
            self._place += 1
            if self._events[self._place - 1].function is CHECKPOINT_BEGINS:
                self._stop_after(self._place - 1)
                return
        raise self._unlike("calls another checkpointed function")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording, kwargs = self._recording, kwargs or {}
        kind = kind_of(func)
        if kind is FunctionKind.DESCRIBES:
            return describe(func, args, kwargs)
        if kind is FunctionKind.GRAD_MODE or kind is FunctionKind.ENTERED:
            return func(*args, **kwargs)
        func = process_flags.with_flags(func, recording.flags)
        found = self._known(func, args, kwargs)
        if found is not UNLIKE:
            return found
        if not recording.is_ours(args) and not recording.is_ours(tuple(kwargs.values())):
            return compute_everywhere(recording, func, kind, args, kwargs)
        if kind is FunctionKind.PRINTS or kind is FunctionKind.READS:
            return read(recording, func, args, kwargs)
        if kind is FunctionKind.HOOKS:
            return Handle(Hook(lambda *_: None, 0))  # of what is computed again, and not gone through
        raise self._unlike(f"calls {function_name(func)}")

    def _known(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result that a call had; `UNLIKE` for one that there was not."""
        recording = self._recording
        for place in range(self._place, len(self._events)):
            event = self._events[place]
            if event.visit < 0:
                continue
            pool, kept, first = list(event.pool), len(recording.kept), len(recording.captured)
            found = event.matcher.match(func, args, kwargs, recording)
            if found is UNLIKE:
                continue
            taken = recording.captured[first:]
            del recording.captured[first:]
            before = recording.captured[event.first_captured : event.first_captured + event.matcher.num_captured]
            if not all(map(_is_same_content, before, taken)):
                raise self._unlike(f"gives {event.name} another number or tensor")
            self._place = place + 1
            self._stop_after(place)
            return _with_former(found, event, pool, recording, kept)
        return UNLIKE

    def _stop_after(self, place: int) -> None:
        if place == self._last:
            raise _Stopped

    def _unlike(self, what: str) -> CheckpointError:
        return _unlike(self._one, f"then {what}", users_line())


def _with_former(found: Any, event: Event, pool: Sequence[Placeholder], recording: Recording, kept: int) -> Any:
    """What an event gives, with the placeholders that the user's code has of its first run: one for each value.

    Args:
        found: what it gives, perhaps with others.
        pool: the event's, as it was before.
        kept: how many placeholders the recording had kept.
    """
    former = {
        id(new): old
        for new, old in zip(event.pool, pool, strict=True)
        if new is not old and old._pl_recording is recording and old._pl_value == new._pl_value
    }
    if not former:
        return found
    event.pool[:] = [former.get(id(new), new) for new in event.pool]
    del recording.kept[kept:]
    return tree.replace(found, lambda tensor: former.get(id(tensor), tensor))


def _unlike(one: ChangingCall, what: str, line: str) -> CheckpointError:
    named = ", ".join(one.changed[:3])
    return CheckpointError(
        f"a checkpointed function changes {named}, and computes with it: it runs again in backward, as in one process, "
        f"and {what} ({line}), called at {one.line}. Change it outside of the function, and give it as an argument"
    )


def _is_same_content(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) or isinstance(other, tuple) or one is other:
        return one is other or one == other
    if isinstance(one, Placeholder) or isinstance(other, Placeholder):
        return False
    return is_same(one, other)
