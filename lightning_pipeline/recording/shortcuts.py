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

import torch
from torch import Tensor, nn

from lightning_pipeline import _torch
from lightning_pipeline.partition.overrides import MethodInPlaceOf
from lightning_pipeline.partition.ownership import HELD_BY
from lightning_pipeline.partition.placeholder import NUM_ATTRIBUTES, Placeholder, TensorSpec
from lightning_pipeline.recording.code_reader import is_plain
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.everywhere import Constants, count
from lightning_pipeline.recording.matcher import CAPTURED, autocast_state, renewed
from lightning_pipeline.recording.pure_modules import PureModule, state_of

DRAW = object()
"""Among what a call takes along: the number of its next draw of random numbers."""
_MAX_FRUITLESS = 8
"""Calls in a row that gave no shortcut, or changes of the module with no shortcut taken between them, after which it is
left alone."""


class Argument(NamedTuple):
    """Among what a call takes along: one of its arguments, by place."""

    place: int


class Given(NamedTuple):
    """One argument of a call.

    Attributes:
        value: the number of the value that it stands for; -1 for a tensor that every rank has, -2 for no tensor, -3 for
            one of the module's.
        constant: what else it is, or the module's tensor.
    """

    value: int
    spec: TensorSpec | None
    constant: Any

    def is_like(self, argument: Any, recording: Any) -> bool:
        kind = type(argument)
        if kind is Placeholder:
            is_value = argument._pl_value == self.value and argument._pl_recording is recording
            return is_value and argument._pl_spec is self.spec
        if kind is Tensor:
            spec = self.spec
            return (
                (argument is self.constant if self.value == -3 else self.value == -1)
                and spec is not None
                and argument.shape == spec.shape
                and argument.dtype is spec.dtype
                and argument.requires_grad is spec.requires_grad
                and argument.layout is torch.strided
                and argument.stride() == spec.stride
                and argument.device == spec.device
                and HELD_BY not in argument.__dict__
                and (self.value == -3) is (recording.tensors.number_of(argument) is not None)
            )
        constant = self.constant
        return self.value == -2 and (
            argument is constant or (kind is type(constant) and is_plain(argument) and repr(argument) == repr(constant))
        )


class Made(NamedTuple):
    """A result of a call.

    Attributes:
        maker: the event that makes it; None where it is an argument, or no tensor.
        place: in the maker's pool, or among the arguments; -1 for no tensor.
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
        layout: how the arguments are given.
        same: for each argument, the first of them that is the same object.
        grad, autocast: whether autograd was on, and `autocast_state`.
        end: the call's last event.
        captures: what the call takes along, in order: `DRAW`, an `Argument`, a number, or a constant tensor.
        counters: what it increases by one on every rank, as batch norms do.
        made: the result; those in a tuple, if it is one.
        makers: the events that make them.
        gives_tuple: whether it is one.
    """

    state: PureModule
    layout: Any
    given: list[Given]
    same: list[int]
    grad: bool
    autocast: Any
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
    is_grad_enabled, is_inference, is_autocast = (
        torch.is_grad_enabled,
        _torch.is_inference_mode_enabled,
        _torch.is_any_autocast_enabled,
    )
    num_modes, unseen = _torch.num_function_modes, _torch.DisableTorchFunction

    def again(made: Made, items: Sequence[Any], recording: Any) -> Any:
        maker, number, value, spec, constant = made
        if maker is None:
            return constant if number < 0 else items[number]
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
        if recording is None or is_left_alone or is_inference() or num_modes() != recording.num_modes:
            return plain(module, *args, **kwargs)
        items, layout = _flat(args, kwargs)
        begin = recording.event
        grad, autocast = is_grad_enabled(), autocast_state() if is_autocast() else None
        with unseen():
            if state is None or not state.is_unchanged():
                state = state_of(module)
                fruitless, changes = fruitless + 1, changes + 1
            known: Shortcut | None = None if begin.shortcuts is None else begin.shortcuts.get(module)
            is_known = (
                known is not None
                and known.state is state
                and known.grad is grad
                and known.autocast == autocast
                and known.layout == layout
                and all(one.is_like(item, recording) for one, item in zip(known.given, items, strict=True))
                and (len(items) == 1 or known.same == _same(items))
            )
        if is_known and known is not None and (not known.counters or count(recording, known.counters)):
            changes = 0
            for capture in known.captures:
                if capture is DRAW:
                    recording.note_draw()
                elif type(capture) is Argument:
                    recording.capture(items[capture.place])
                elif type(capture) is Tensor:
                    recording.capture(capture)
                else:
                    recording.captured.append(capture)
            if known.end is not begin:
                recording.event, recording.skipped[known.end] = known.end, (begin, known.makers)
            if known.gives_tuple:
                return tuple([again(one, items, recording) for one in known.made])
            return again(known.made[0], items, recording)
        if state is None:
            return plain(module, *args, **kwargs)
        given = _given(items, recording)
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
        captures = _captures(begin, end, items, given, recording.captured, partial(constants.has, begin=since))
        gives_tuple = type(result) is tuple
        results = [*result] if gives_tuple else [result]
        sources = [_made(one, begin, end, items, recording) for one in results]
        made = tuple(one for one in sources if one is not None)
        tensors = {id(one) for one in results if isinstance(one, Tensor)}
        is_known = len(made) == len(results) and len(tensors) == sum(isinstance(one, Tensor) for one in results)
        if captures is not None and is_known and state.is_unchanged():
            makers = frozenset(one.maker for one in made if one.maker is not None)
            how = (state, layout, given, _same(items), grad, autocast, end, captures, counters)
            shortcut = Shortcut(*how, made, makers, gives_tuple)
            begin.shortcuts = {**(begin.shortcuts or {}), module: shortcut}
            fruitless = 0
        return result

    in_place = MethodInPlaceOf(MethodType(nn.Module._call_impl, module), call)
    return in_place


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """The arguments, tuples taken apart, and how they were given."""
    if not kwargs and tuple not in map(type, args):
        return args, len(args)
    items: list[Any] = []
    layout: list[Any] = [len(args), *kwargs]
    for argument in (*args, *kwargs.values()):
        if type(argument) is tuple:
            layout.append(len(argument))
            items.extend(argument)
        else:
            layout.append(None)
            items.append(argument)
    return items, layout


def _same(items: Sequence[Any]) -> list[int]:
    """For each argument the first one that is the same object."""
    ids = list(map(id, items))
    return list(map(ids.index, ids))


def _given(items: Sequence[Any], recording: Any) -> list[Given] | None:
    """What arguments are; None if one of them may change, or is not of this micro-batch."""
    found = []
    for item in items:
        if type(item) is Placeholder and item._pl_recording is recording:
            found.append(Given(item._pl_value, item._pl_spec, None))
        elif type(item) is Tensor and HELD_BY not in item.__dict__:
            is_modules = recording.tensors.number_of(item) is not None
            found.append(Given(-3, TensorSpec.of(item), item) if is_modules else Given(-1, TensorSpec.of(item), None))
        elif is_plain(item):
            found.append(Given(-2, None, item))
        else:
            return None
    return found


def _made(result: Any, begin: Event, end: Event, items: Sequence[Any], recording: Any) -> Made | None:
    """How a call comes to a result; None if that is not known."""
    for place, item in enumerate(items):
        if result is item and isinstance(result, Tensor):
            return Made(None, place)
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
    items: Sequence[Any],
    given: Sequence[Given],
    captured: Sequence[Any],
    is_constant: Callable[[Any], bool],
) -> tuple[Any, ...] | None:
    """What a call has taken along; None if it did anything else than to compute from its arguments, numbers, and the
    module's tensors.
    """
    found: list[Any] = []
    values = {one.value for one in given if one.value >= 0}
    event: Event | None = end
    while event is not begin:
        if event is None or event.visit < 0 or event.match is not event.matcher.match:
            return None  # it is a mark, depends on data, or writes into what others share
        written = [event.inputs[slot] for slot, _, _ in event.writes]
        if any(type(number) is not int or 0 <= number < begin.num_values for number in written):
            return None  # it writes into something else than the module's tensors, and what it makes itself
        for number in event.inputs:
            is_own = type(number) is int and (number < 0 or number in values or number >= begin.num_values)
            if number is not CAPTURED and not is_own:
                return None
        for place in reversed(range(event.matcher.num_captured)):
            content = captured[event.first_captured + place]
            if place == 0 and event.draws:
                found.append(DRAW)
            elif type(content) in (int, float) or is_constant(content):
                found.append(content)
            else:
                argument = next((number for number, item in enumerate(items) if item is content), None)
                if argument is None:
                    return None
                found.append(Argument(argument))
        event = event.parent
    found.reverse()
    return tuple(found)
