"""Calls of modules that only compute (`pure_modules`), recorded as one event each.

What such a call comes to follows from the module and the arguments, which are compared at every call. Everything else
(hooks, a forward that is not proven pure, a function mode of the user's) takes the usual way, function by function::

    begin ── layer_norm ── linear ── gelu ── linear ── add ── end      a block's call, the first time
      └──────────────────── shortcut ─────────────────────────┘        from then on
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import getweakrefcount

from torch import Tensor, nn

from lightning_pipeline import _torch
from lightning_pipeline.partition.overrides import MethodInPlaceOf
from lightning_pipeline.partition.ownership import HELD_BY
from lightning_pipeline.partition.placeholder import NUM_ATTRIBUTES, Placeholder, TensorSpec
from lightning_pipeline.recording.code_reader import is_plain
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.everywhere import Constants, count
from lightning_pipeline.recording.matcher import CAPTURED, UNLIKE, Given, make_comparison, renewed
from lightning_pipeline.recording.operation import TensorSlot, take_apart
from lightning_pipeline.recording.path import inspect
from lightning_pipeline.recording.pure_modules import PureModule, state_of

DRAW = object()
"""Among what a call takes along: the number of its next draw of random numbers."""
_MAX_FRUITLESS = 8
"""Calls in a row that gave no shortcut, or changes of the module with no shortcut taken between them, after which it is
left alone."""


class Made(NamedTuple):
    """A result of a call.

    Attributes:
        maker: the event that makes it; None where it is an argument, or no tensor.
        place: in the maker's pool, or the argument's slot; -1 for no tensor.
        constant: what else it is.
    """

    maker: Event | None
    place: int
    value: int = -1
    spec: TensorSpec | None = None
    constant: Any = None


class Shortcut(NamedTuple):
    """Where a call leads from an event.

    Attributes:
        match: gives the tensors of a like call (`make_comparison`).
        end: the call's last event.
        captures: what the call takes along, in order: `DRAW`, the slot of one of its arguments, a number, or a tensor
            that is constant.
        counters: what it increases by one on every rank, as batch norms do.
        made: the result; those in a tuple, if it is one.
        makers: the events that make them.
        gives_tuple: whether it is one.
    """

    state: PureModule
    match: Callable[..., Any]
    end: Event
    captures: tuple[Any, ...]
    counters: list[Tensor]
    made: tuple[Made, ...]
    makers: frozenset[Event]
    gives_tuple: bool


def calls_of(module: nn.Module, recorder: Any) -> Callable[..., Any]:
    """What is called in place of ``module._call_impl`` while steps are recorded.

    Args:
        recorder: has the recording that runs as ``current``.
    """
    state: PureModule | None = None
    fruitless = changes = 0
    refs, weak_refs, frame = sys.getrefcount, getweakrefcount, sys._getframe
    num_modes, unseen = _torch.num_function_modes, _torch.DisableTorchFunction

    def again(made: Made, operands: Sequence[Tensor], recording: Any) -> Any:
        maker, number, value, spec, constant = made
        if maker is None:
            return constant if number < 0 else operands[number]
        pool = maker.pool
        place = pool[number]
        is_free = refs(place) == 3 and len(place.__dict__) == NUM_ATTRIBUTES and not weak_refs(place)
        if not is_free or place._pl_spec is not spec:
            place = pool[number] = renewed(place, spec, place._pl_what)  # type: ignore[arg-type]
        place._pl_value, place._pl_recording = value, recording
        return place

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal state, fruitless, changes
        plain = nn.Module._call_impl  # which users may replace
        caller = frame(1).f_locals.get("self")
        if caller is not module and isinstance(caller, nn.Module) and vars(caller).get("_call_impl") is in_place:
            return plain(caller, *args, **kwargs)  # a copy that a step has made, with all attributes
        recording = recorder.current
        is_left_alone = fruitless > _MAX_FRUITLESS or changes > _MAX_FRUITLESS
        if recording is None or is_left_alone or num_modes() != recording.num_modes:
            return plain(module, *args, **kwargs)
        begin = recording.event
        with unseen():
            if state is None or not state.is_unchanged():
                state = state_of(module)
                fruitless, changes = fruitless + 1, changes + 1
            known: Shortcut | None = None if begin.shortcuts is None else begin.shortcuts.get(module)
            operands: Any = UNLIKE
            if known is not None and known.state is state:
                operands = known.match(call, args, kwargs, recording)
        if operands is not UNLIKE and known is not None and (not known.counters or count(recording, known.counters)):
            changes = 0
            for capture in known.captures:
                if capture is DRAW:
                    recording.note_draw()
                elif type(capture) is TensorSlot:
                    recording.capture(operands[capture.number])
                elif type(capture) is Tensor:
                    recording.capture(capture)
                    if recording.constants is not None:
                        recording.constants.adopt(capture)
                else:
                    recording.captured.append(capture)
            if known.end is not begin:
                recording.event, recording.skipped[known.end] = known.end, (begin, known.makers)
            if known.gives_tuple:
                return tuple([again(one, operands, recording) for one in known.made])
            return again(known.made[0], operands, recording)
        if state is None:
            return plain(module, *args, **kwargs)
        given = _given(call, args, kwargs, recording, state.read)
        aside, num_counted = recording.num_aside, len(recording.counted)
        around = recording.constants
        constants = recording.constants = around or Constants()
        since = constants.begin()
        result = plain(module, *args, **kwargs)
        recording.constants = around
        end = recording.event
        if type(result) is Tensor:
            return result  # every rank computes it, as before there are stages
        fruitless += 1
        counters = recording.counted[num_counted:]
        num_known = len(counters) + constants.number_since(since)
        is_all = recording.num_aside == aside + num_known and state.has(counters)
        if given is None or not is_all or type(result) not in (Placeholder, tuple):
            return result
        tensors = given[0].tensors
        captures = _captures(begin, end, tensors, given[1], recording.captured, partial(constants.has, begin=since))
        gives_tuple = type(result) is tuple
        results = [*result] if gives_tuple else [result]
        sources = [_made(one, begin, end, tensors, recording) for one in results]
        made = tuple(one for one in sources if one is not None)
        different = {id(one) for one in results if isinstance(one, Tensor)}
        is_known = len(made) == len(results) and len(different) == sum(isinstance(one, Tensor) for one in results)
        if captures is not None and is_known and state.is_unchanged():
            makers = frozenset(one.maker for one in made if one.maker is not None)
            match = make_comparison(call, given, recording.tensors.tensors, state.read)
            shortcut = Shortcut(state, match, end, captures, counters, made, makers, gives_tuple)
            begin.shortcuts = {**(begin.shortcuts or {}), module: shortcut}
            fruitless = 0
        return result

    call.shaped_by_numbers = True  # type: ignore[attr-defined]  # each of them is compared
    in_place = MethodInPlaceOf(MethodType(nn.Module._call_impl, module), call)
    return in_place


def _given(function: Any, args: Any, kwargs: Any, recording: Any, read: frozenset[str]) -> Given | None:
    """What a call is given (`inspect`); None if an argument may change, or is not of this micro-batch, or has an
    attribute of the user's that is `read`."""
    with _torch.DisableTorchFunction():
        call = take_apart(function, args, kwargs)
        if not all(map(_is_fixed, (*call.args, *call.kwargs.values()))):
            return None
        for one in call.tensors:
            is_of_step = one._pl_recording is recording if type(one) is Placeholder else type(one) is Tensor
            if not is_of_step or HELD_BY in one.__dict__ or not read.isdisjoint(one.__dict__):
                return None
        return inspect(recording, function, args, kwargs)


def _is_fixed(template: Any) -> bool:
    is_tuple = type(template) is tuple
    return all(map(_is_fixed, template)) if is_tuple else type(template) is TensorSlot or is_plain(template)


def _made(result: Any, begin: Event, end: Event, tensors: Sequence[Tensor], recording: Any) -> Made | None:
    """How a call comes to a result; None if that is not known."""
    for slot, tensor in enumerate(tensors):
        if result is tensor:
            return Made(None, slot)
    if is_plain(result):
        return Made(None, -1, constant=result)
    if type(result) is not Placeholder or result._pl_recording is not recording:
        return None
    value: Any = result._pl_value
    event: Event | None = end
    while event is not begin:
        assert event is not None
        made = [output for output in event.outputs if output is not None]
        if value in made:
            return Made(event, made.index(value), result._pl_value, result._pl_spec)
        # Written into in place: the same placeholder, by another number before.
        value = next((event.inputs[slot] for slot, _, after in event.writes if after == value), value)
        event = event.parent
    return None


def _captures(
    begin: Event,
    end: Event,
    tensors: Sequence[Tensor],
    inputs: Sequence[Any],
    captured: Sequence[Any],
    is_constant: Callable[[Any], bool],
) -> tuple[Any, ...] | None:
    """What a call has taken along; None if it did anything else than to compute from its arguments, numbers, and the
    module's tensors.
    """
    found: list[Any] = []
    event: Event | None = end
    while event is not begin:
        if event is None or event.visit < 0 or event.match is not event.matcher.match:
            return None  # it is a mark, depends on data, or writes into what others share
        written = [event.inputs[slot] for slot, _, _ in event.writes]
        if any(type(number) is not int or 0 <= number < begin.num_values for number in written):
            return None  # it writes into something else than the module's tensors, and what it makes itself
        for number in event.inputs:
            is_own = type(number) is int and (number < 0 or number in inputs or number >= begin.num_values)
            if number is not CAPTURED and not is_own:
                return None
        for place in reversed(range(event.matcher.num_captured)):
            content = captured[event.first_captured + place]
            if place == 0 and event.draws:
                found.append(DRAW)
            elif type(content) in (int, float) or is_constant(content):
                found.append(content)
            else:
                slot = next((slot for slot, tensor in enumerate(tensors) if tensor is content), None)
                if slot is None:
                    return None
                found.append(TensorSlot(slot))
        event = event.parent
    found.reverse()
    return tuple(found)
