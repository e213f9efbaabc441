"""Values that share memory, and writes into them: a tensor and its views follow one another as they do in one process.

One process has one memory: who writes into a view writes into the whole, and autograd goes back through the write from
both. Stages compute with numbered values, so that every tensor that sees a write gets a new number::

    x = layer(a)        v7
    part = x[:, :4]     v8, a view of v7
    part.add_(b)        v9, the part after the write
                        v10 = seen_through(v7, v9): x after the write, which is the same tensor on its stage

Where the write runs on another visit than the tensors, that one gets the whole first, and makes the views anew::

    visit 0             visit 1
    v7, v8 = v7[:, :4]  v9 = seen_through(v7), v10 = v9[:, :4], v11 is v10 after the write, v12 = seen_through(v9, v11)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.memory import memory_of, views_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, placeholder
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.absorbed import refuse_shared, stand_for
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.inference import Result
from lightning_pipeline.recording.kept_views import arguments_again
from lightning_pipeline.recording.matcher import CAPTURED, UNLIKE
from lightning_pipeline.recording.path import answer, follow, inspect, note_written
from lightning_pipeline.recording.views import Views

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


def seen_through(tensor: Tensor, written: Tensor | None = None) -> Tensor:
    """A tensor, after a write into another one that shares its memory, or where a write is to come."""
    return tensor


def part_of(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """A view of a tensor that begins `offset` elements after it, wherever that is in its memory."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class Sharer(NamedTuple):
    """A tensor that shares the memory of some that an event writes into.

    Attributes:
        values: those that it may have before the event.
        pool, place: where its placeholder is, if it is not among those that the recording has kept.
        slots: of the event's operands, each with whether gradients go back from the tensor to what is written.
    """

    values: frozenset[int]
    pool: list[Placeholder]
    place: int
    slots: tuple[tuple[int, bool], ...] = ()


def sharers_of(recording: Recording, inputs: Sequence[Any], result: Result) -> list[Sharer]:
    """The tensors that share the memory of those that a call writes into, in the order in which they were made."""
    views = recording.placing.views
    written = [(slot, views.tensor_of(inputs[slot])) for slot, _ in result.writes if _is_value(inputs[slot])]
    slots: dict[int, list[tuple[int, bool]]] = {}
    for slot, own in written:
        for tensor in views.family(own):
            if tensor != own:
                gets_gradient = views.whole_for_autograd(tensor) == views.whole_for_autograd(own)
                slots.setdefault(tensor, []).append((slot, gets_gradient))
    return [_sharer(views, tensor, slots[tensor]) for tensor in sorted(slots)]


def _is_value(operand: Any) -> bool:
    return type(operand) is int and operand >= 0


def _sharer(views: Views, tensor: int, slots: Sequence[tuple[int, bool]] = ()) -> Sharer:
    values = frozenset((tensor, views.value_of(tensor)))
    return Sharer(values, *_placeholder_in(views, tensor), tuple(slots))


def _placeholder_in(views: Views, tensor: int) -> tuple[list[Placeholder], int]:
    """The pool and the place in it in which the placeholder of a tensor is."""
    event = views.view(tensor).event
    if event is None or tensor not in event.outputs:
        return [], 0
    made = [value for value in event.outputs if value is not None]
    return event.pool, made.index(tensor)


def alive(recording: Recording, sharer: Sharer) -> list[Placeholder]:
    """The placeholders by which the user's code refers to a tensor."""
    found = []
    pool, place = sharer.pool, sharer.place
    if pool and pool[place]._pl_recording is recording and sys.getrefcount(pool[place]) > 2:
        found.append(pool[place])
    kept = recording.kept
    found += [kept[i] for i in range(len(kept)) if kept[i]._pl_recording is recording and sys.getrefcount(kept[i]) > 2]
    of_batch = (reference() for reference in recording.batch_places)
    found += [one for one in of_batch if type(one) is Placeholder and one._pl_recording is recording]
    return [one for one in found if one._pl_value in sharer.values]


def come_together(
    recording: Recording, visit: int, inputs: Sequence[Any], result: Result, sharers: Sequence[Sharer]
) -> bool:
    """Bring tensors that share memory to the visit that writes into it. Returns whether any have come.

    Raises:
        NotImplementedError: a view cannot be made there.
    """
    placing = recording.placing
    written = [inputs[slot] for slot, _ in result.writes if _is_value(inputs[slot])]
    for value in dict.fromkeys(written):
        views = placing.views
        own = views.tensor_of(value)
        first = views.first_of(own)
        if views.has_parted(own) and any(alive(recording, sharer) for sharer in sharers):
            raise NotImplementedError(
                f"what shared its memory with another tensor has had its .data set, and one of them is written into "
                f"({users_line()}): write into a clone()"
            )
        if placing.memory.module_tensor(first) is not None:
            used, others = {own}, [own]
        else:
            family = {*views.family(own)}
            others = [views.tensor_of(place._pl_value) for sharer in sharers for place in alive(recording, sharer)]
            others = [tensor for tensor in others if tensor in family]
            used = {own, *others}
            first = _first(recording, views, used)
        at = {placing.home(views.value_of(tensor)) for tensor in (first, *used)}
        if others and at != {visit}:
            _make_anew(recording, views, visit, first, used)
            return True
    return False


def bring_base(
    recording: Recording, visit: int, operands: Sequence[Tensor], inputs: Sequence[Any], result: Result
) -> bool:
    """Make a tensor that every rank has, and its views, values of the visit that writes into one of them, as where
    ``total[i] += loss`` adds to a row of zeros or of a buffer. Returns whether there were views.
    """
    known = recording.memory
    for slot, _ in result.writes:
        of_buffer = _replicated_buffer(recording, operands[slot], inputs[slot])
        if of_buffer is not None and _bring_views_of_buffer(recording, of_buffer):
            return True
        if inputs[slot] is not CAPTURED or of_buffer is not None or memory_of(operands[slot]) in known.batch:
            continue
        with _torch.DisableTorchFunction():
            whole = operands[slot]._base
        base = operands[slot] if whole is None else whole
        if recording.tensors.number_of(base) is not None:  # a view of it that a hook has made
            continue
        known.coming = views_of(base)
        if not known.coming:
            continue
        parts = [_part(one, base) for one in known.coming]
        _see(recording, base, None, TensorSpec.of(base), visit)  # refused if others share the memory
        known.coming = ()
        _stand_for_parts(recording, parts, base)
        return True
    return False


def _replicated_buffer(recording: Recording, tensor: Tensor, operand: Any) -> int | None:
    """The number of a buffer that every rank has, which is written into, itself or where a view of it is."""
    tensors = recording.tensors
    if operand is CAPTURED:
        return tensors.replicated_at(memory_of(tensor))
    is_buffer = type(operand) is int and operand < 0 and tensors.is_replicated(-1 - operand)
    return -1 - operand if is_buffer else None


def _bring_views_of_buffer(recording: Recording, number: int) -> bool:
    """Make views of a buffer that every rank has, also by ``.data``, views of one that stages compute with. Returns
    whether there were any.

    Raises:
        NotImplementedError: an array shares its memory, or a view that was made before this step's micro-batch.
    """
    buffer = recording.tensors.tensors[number]
    memory = memory_of(buffer)
    views = recording.memory.views_in_step(memory, buffer)
    if memory in recording.memory.exposed or not {*map(id, views_of(buffer))} <= {*map(id, views)}:
        refuse_shared()
    if views:
        note_written(recording, {number})
    _stand_for_parts(recording, [_part(view, buffer) for view in views], buffer)
    return bool(views)


class _Part(NamedTuple):
    """Which part of a tensor a view is.

    Attributes:
        whole: the id of the tensor that autograd takes it for a view of, which is another one than that of the base
            for what was made by ``.data`` or ``detach()``.
        place: its size, its strides, and where it begins.
    """

    view: Tensor
    whole: int
    place: tuple[torch.Size, tuple[int, ...], int]


def _part(view: Tensor, base: Tensor) -> _Part:
    with _torch.DisableTorchFunction():
        begins = int(view.storage_offset()) - int(base.storage_offset())
        return _Part(view, _whole(view), (view.shape, view.stride(), begins))


def _whole(tensor: Tensor) -> int:
    return id(tensor if tensor._base is None else tensor._base)


def _stand_for_parts(recording: Recording, parts: Sequence[_Part], base: Tensor) -> None:
    """Have views of a tensor which is a value now be views of that."""
    with _torch.DisableTorchFunction():
        sources: dict[int, Tensor] = {_whole(base) if type(base) is not Placeholder else id(base): base}
    for view, whole, place in parts:
        if whole not in sources:
            sources[whole] = recording.__torch_function__(Tensor.data.__get__, (), (base,))  # type: ignore[attr-defined]
        stand_for(recording, view, recording.__torch_function__(part_of, (), (sources[whole], *place)))


def _first(recording: Recording, views: Views, tensors: set[int]) -> int:
    """The tensor of which these can be made anew."""
    wholes = {views.whole_for_autograd(tensor) for tensor in tensors}
    if len(wholes) == 1:
        return wholes.pop()
    [first] = {views.first_of(tensor) for tensor in tensors}
    for tensor in sorted(tensors):
        has_graph = any(place.requires_grad for place in _placeholders(recording, views, tensor))
        if has_graph and views.whole_for_autograd(tensor) != first:
            raise NotImplementedError(
                f"what a later stage computes is written ({users_line()}) into memory that a tensor shares with a "
                f"detached one, which both have gradients: write into a clone()"
            )
    return first


def _make_anew(recording: Recording, views: Views, visit: int, first: int, used: set[int]) -> None:
    """Bring a tensor to a visit, and make those views of it there that are used."""
    needed = set(used)
    for tensor in used:
        while tensor != first and (source := views.view(tensor).source) is not None:
            tensor = source
            needed.add(tensor)
    new: dict[int, Placeholder] = {}
    made: dict[tuple[int, int], list[Any]] = {}
    for tensor in [first, *(one for one in views.family(first) if one in needed and one != first)]:
        places = _placeholders(recording, views, tensor)
        if tensor == first and recording.placing.memory.module_tensor(first) is not None:
            new[first] = _view_of_module(recording, views, first, visit)
        elif tensor == first:
            value = views.value_of(first)
            place = places[0] if places else recording.placeholder_for(value, _spec(recording, value), "a tensor")
            new[first] = _bring(recording, place, visit)
        else:
            view = views.view(tensor)
            assert view.event is not None and view.source is not None
            key = (id(view.event), view.source)
            if key not in made:
                made[key] = _call_again(recording, view.event, views, new[view.source], view.source)
            new[tensor] = made[key][view.place]
        pool, index = _placeholder_in(views, tensor)
        for place in places:
            if place is not new[tensor]:
                _follow(recording, place, new[tensor])
                if pool and pool[index] is place:  # which is no longer what the event made
                    pool[index] = placeholder(place._pl_spec, place._pl_what)
                if not any(one is place for one in recording.kept):
                    recording.keep(place)


def _bring(recording: Recording, place: Placeholder, visit: int) -> Placeholder:
    """Have a visit receive a tensor. Returns a placeholder for what may be written into there."""
    if not recording.is_in_checkpoint:
        _see(recording, place, None, place._pl_spec, visit)
        return place
    # What a checkpointed function is given on a visit has to stay as it is.
    return _followed(recording, Tensor.clone, (place,), None, visit)


def _view_of_module(recording: Recording, views: Views, tensor: int, visit: int) -> Placeholder:
    """Make a view of a tensor of the module on a visit."""
    view = views.view(tensor)
    assert view.event is not None
    args, kwargs = arguments_again(recording, view.event, views, None, -1)
    with torch.set_grad_enabled(view.event.state[0]):
        made: Any = tree.leaves(_followed(recording, view.event.function, args, None, visit, **kwargs))
    found: Placeholder = made[view.place]
    return found


def _placeholders(recording: Recording, views: Views, tensor: int) -> list[Placeholder]:
    return alive(recording, _sharer(views, tensor))


def _spec(recording: Recording, value: int) -> TensorSpec:
    """What is known of a value that nobody refers to any more, from its use."""
    uses = (event for event in recording.event.path() if value in event.inputs)
    event = next(uses)
    return event.specs[event.inputs.index(value)]


def _call_again(recording: Recording, event: Event, views: Views, source: Placeholder, tensor: int) -> list[Any]:
    """Call what made views, on the tensor `source`. Returns what it makes."""
    args, kwargs = arguments_again(recording, event, views, source, tensor)
    with torch.set_grad_enabled(event.state[0]):
        return [*tree.leaves(recording.__torch_function__(event.function, (), args, kwargs))]


def tell_sharers(recording: Recording, event: Event, operands: Sequence[Tensor]) -> None:
    """Have the tensors that share memory see what an event has written."""
    values = {slot: value for slot, _, value in event.writes}
    for sharer in event.sharers:
        places = alive(recording, sharer)
        for slot, gets_gradient in sharer.slots if places else ():
            [written] = {one for one in operands if type(one) is Placeholder and one._pl_value == values[slot]}
            first, spec = places[0], places[0]._pl_spec
            if gets_gradient and written.requires_grad and not spec.requires_grad:
                spec = spec.but(requires_grad=True, is_leaf=False)
            _see(recording, first, written if gets_gradient else None, spec, event.visit)
            for other in places[1:]:
                _follow(recording, other, first)


def _follow(recording: Recording, place: Placeholder, other: Placeholder) -> None:
    """Have a placeholder stand for another one's value."""
    if place is not other:
        place._pl_value = other._pl_value
        if place._pl_spec is not other._pl_spec:
            recording.change(place, other._pl_spec)


def _see(recording: Recording, place: Tensor, written: Tensor | None, spec: TensorSpec, visit: int) -> None:
    """Give a tensor the value that it has after a write."""
    args = (place,) if written is None else (place, written)
    _followed(recording, seen_through, args, Result(tree.Slot(0), (0,), ((0,),), ((0, spec),)), visit)


def _followed(recording: Recording, func: Any, args: Any, result: Result | None, visit: int, **kwargs: Any) -> Any:
    """Go on with a call on a visit. Returns what it gives.

    Args:
        result: None for what `func` gives on tensors like these.
    """
    for child in recording.event.children:
        if child.visit == visit and (found := child.match(func, args, kwargs, recording)) is not UNLIKE:
            recording.event = child
            return found
    call, inputs, specs, state = inspect(recording, func, args, kwargs)
    result = result or recording.recorder.result(func, call, specs, state)
    assert result is not None
    event = follow(recording, func, call, inputs, specs, state, result, visit=visit, draws=False)
    return answer(recording, event, func, args, kwargs)
