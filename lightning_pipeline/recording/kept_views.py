"""Tensors to which the user's code refers after a step, and views of them: they share their memory on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import Placeholder, become
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.matcher import CAPTURED
from lightning_pipeline.recording.operation import put_together
from lightning_pipeline.recording.views import Views

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


class KeptView(NamedTuple):
    """A view, and what it is a view of.

    Attributes:
        calls: which made it: for each, the event, the number of the tensor that it makes a view of, and the place of
            the view among what it made.
    """

    view: weakref.ref[Tensor]  # whether anybody else refers to it is counted
    whole: weakref.ref[Tensor]
    calls: Sequence[tuple[Event, int, int]]


def kept_views(recording: Recording, places: Sequence[Placeholder]) -> list[KeptView]:
    """Among what the user's code refers to after a step, the views of others."""
    if len(places) < 2:
        return []
    views = recording.recorder.views_at(recording.event)
    tensors = {place.value: views.tensor_of(place.value) for place in places}
    wholes: dict[int, Placeholder] = {}  # by the tensor whose data they are
    found = []
    for place in sorted(places, key=lambda one: tensors[one.value]):
        calls: list[tuple[Event, int, int]] = []
        at: int | None = tensors[place.value]
        while at is not None and views.with_same_data(at) not in wholes:
            view = views.view(at)
            if view.event is not None and view.source is not None:
                calls.insert(0, (view.event, view.source, view.place))
            at = view.source
        if at is not None:
            found.append(KeptView(weakref.ref(place), weakref.ref(wholes[views.with_same_data(at)]), calls))
        wholes.setdefault(views.with_same_data(tensors[place.value]), place)
    return found


def share_memory_again(recording: Recording) -> None:
    """Have views share memory with what they are views of, now that both have data of their own."""
    views = recording.recorder.views_at(recording.event)
    for view_place, whole_place, calls in recording.kept_views:
        view, whole = view_place(), whole_place()
        if view is None or whole is None or type(view) is Placeholder or type(whole) is Placeholder:
            continue  # nobody refers to it any more
        tensor = whole.detach()
        for event, source, place in calls:
            args, kwargs = arguments_again(recording, event, views, tensor, source)
            made: Any = tree.leaves(event.function(*args, **kwargs))
            tensor = made[place]
        become(view, tensor.detach())


def refuse_written(recording: Recording, place: Placeholder) -> None:
    """Refuse a write into an earlier micro-batch's value, if another one shares its memory and would not see it.

    Raises:
        NotImplementedError: for such a write.
    """
    if any(place is view() or place is whole() for view, whole, _ in recording.kept_views):
        raise NotImplementedError(
            f"what an earlier micro-batch has kept is written into, and another tensor that it has kept shares its "
            f"memory ({users_line()}): keep a clone()"
        )


def arguments_again(
    recording: Recording, event: Event, views: Views, source: Any, tensor: int
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a call that made a view of a tensor, with `source` in the place of that."""
    operands: list[Any] = []
    for slot, value in enumerate(event.inputs):
        if value is CAPTURED:
            operands.append(recording.captured[event.first_captured + event.matcher.captured_tensors[slot]])
        elif type(value) is int and value < 0:
            operands.append(recording.tensors.tensors[-1 - value])
        elif type(value) is int and views.tensor_of(value) == tensor:
            operands.append(source)
        elif type(value) is int:
            operands.append(recording.placeholder_for(value, event.specs[slot], "an operand"))
        else:
            raise NotImplementedError(
                f"a view ({event.line}) is made of what a stage computes and of another step's or a hook's tensor, "
                f"and written into ({users_line()}): write into a clone()"
            )
    places = event.matcher.captured_numbers.items()
    numbers = {slot: recording.captured[event.first_captured + place] for slot, place in places}
    args, kwargs = (put_together(one, operands, numbers) for one in (event.call.args, event.call.kwargs))  # type: ignore[arg-type]
    return args, kwargs
