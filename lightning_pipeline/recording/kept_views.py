"""Tensors to which the user's code refers after a step, and views of them: they share their memory on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, become, placeholder
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.compiled_calls import CompiledCall
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.matcher import CAPTURED, EarlierValue, HookTensor
from lightning_pipeline.recording.operation import put_together
from lightning_pipeline.recording.split_modules import SplitCall
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


class ViewOfModule(NamedTuple):
    """A view that a step has kept of a tensor of the module, which changes with that.

    Attributes:
        calls: which make it of that tensor, one after the other.
    """

    view: Tensor
    spec: TensorSpec
    of: Tensor
    calls: Sequence[Callable[[Tensor], Tensor]]

    def make_again(self) -> None:
        """Have the view share the memory of what it is of again, where this rank holds that."""
        if type(self.of) is Placeholder:
            become(self.view, placeholder(self.spec, self.of._pl_what))
            return
        tensor = self.of.detach()
        for call in self.calls:
            tensor = call(tensor)
        become(self.view, tensor.detach())


def view_of_module(recording: Recording, place: Placeholder) -> ViewOfModule | None:
    """How to make a tensor that the user's code refers to after a step from one of the module; None if it is no view of
    one."""
    views = recording.recorder.views_at(recording.event)
    tensor: Any = views.tensor_of(place._pl_value)
    calls: list[Callable[[Tensor], Tensor]] = []
    while (number := views.module_tensor(tensor)) is None:
        view = views.view(tensor) if type(tensor) is int else None
        if view is None or view.event is None or len(view.event.inputs) > 1 or not can_be_called_again(view.event):
            return None
        shared = view.event.result.shares[view.place]
        if not shared:
            return None
        calls.insert(0, _again(recording, view.event, view.place))
        tensor = view.event.inputs[shared[0]]
    if not calls or views.has_parted(tensor):
        return None
    return ViewOfModule(place, place._pl_spec.detached(), recording.tensors.tensors[number], calls)


def _again(recording: Recording, event: Event, place: int) -> Callable[[Tensor], Tensor]:
    """A call that made a view of its only tensor, to be made again."""
    numbers = _numbers(recording, event)

    def again(source: Tensor) -> Tensor:
        args, kwargs = (put_together(one, [source], numbers) for one in (event.call.args, event.call.kwargs))  # type: ignore[arg-type]
        made: Any = tree.leaves(event.function(*args, **kwargs))
        return made[place]

    return again


def kept_views(recording: Recording, places: Sequence[Placeholder]) -> list[KeptView]:
    """Among what the user's code refers to after a step, the views of others."""
    if len(places) < 2:
        return []
    views = recording.recorder.views_at(recording.event)
    tensors = {place._pl_value: views.tensor_of(place._pl_value) for place in places}
    wholes: dict[int, Placeholder] = {}  # by the tensor whose data they are
    found = []
    for place in sorted(places, key=lambda one: tensors[one._pl_value]):
        tensor = tensors[place._pl_value]
        if views.has_parted(tensor):
            continue
        calls = _calls_from_whole(views, tensor, wholes)
        if calls is not None:
            whole, rest = calls
            found.append(KeptView(weakref.ref(place), weakref.ref(whole), rest))
        wholes.setdefault(views.with_same_data(tensor), place)
    return found


def _calls_from_whole(
    views: Views, tensor: int, wholes: Mapping[int, Placeholder]
) -> tuple[Placeholder, list[tuple[Event, int, int]]] | None:
    """The nearest tensor among `wholes` that one is a view of, and the calls that make it; None without."""
    calls: list[tuple[Event, int, int]] = []
    while (whole := wholes.get(views.with_same_data(tensor))) is None:
        view = views.view(tensor)
        if view.event is None or view.source is None:
            return None
        if len(view.event.inputs) > 1 or not can_be_called_again(view.event):
            return None
        calls.insert(0, (view.event, view.source, view.place))
        tensor = view.source
    return whole, calls


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
    """Refuse a write into an earlier micro-batch's value, if another one shares its memory and would not see it."""
    if view_of_module(recording, place) is not None:
        raise NotImplementedError(
            f"a view of a weight or buffer, which an earlier micro-batch has kept, is written into in a step "
            f"({users_line()}): write into the weight or buffer itself"
        )
    if any(place is view() or place is whole() for view, whole, _ in recording.kept_views):
        raise NotImplementedError(
            f"what an earlier micro-batch has kept is written into, and another tensor that it has kept shares its "
            f"memory ({users_line()}): keep a clone()"
        )


def can_be_called_again(event: Event) -> bool:
    """Whether an event is a call of torch's, on nothing that another step or a hook has made."""
    is_torchs = type(event.function) not in (CompiledCall, SplitCall) and not hasattr(event.function, "applies")
    return is_torchs and not any(isinstance(value, HookTensor | EarlierValue) for value in event.inputs)


def arguments_again(
    recording: Recording, event: Event, views: Views, source: Any, tensor: int
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a call that made a view of a tensor, with `source` in the place of that.

    Raises:
        NotImplementedError: it cannot be called again.
    """
    if not can_be_called_again(event):
        raise NotImplementedError(
            f"what is written into ({users_line()}) shares its memory with what {event.name} gave ({event.line}), "
            f"which cannot be called again on another stage: write into a clone()"
        )
    operands: list[Any] = []
    for slot, value in enumerate(event.inputs):
        if value is CAPTURED:
            operands.append(recording.captured[event.first_captured + event.matcher.captured_tensors[slot]])
        elif value < 0:
            operands.append(recording.tensors.tensors[-1 - value])
        elif views.tensor_of(value) == tensor:
            operands.append(source)
        else:
            operands.append(recording.placeholder_for(value, event.specs[slot], "an operand"))
    numbers = _numbers(recording, event)
    args, kwargs = (put_together(one, operands, numbers) for one in (event.call.args, event.call.kwargs))  # type: ignore[arg-type]
    return args, kwargs


def _numbers(recording: Recording, event: Event) -> dict[int, Any]:
    """The numbers that a call was given."""
    places = event.matcher.captured_numbers.items()
    return {slot: recording.captured[event.first_captured + place] for slot, place in places}
