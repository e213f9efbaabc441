"""Calls on what every rank has: they are computed on every rank, and are no events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.torch_functions import FunctionKind, drawn_into, function_name, is_drawing_of_own
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.new_events import refuse_drawn_weights
from lightning_pipeline.recording.operation import tensors_in

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


_EMPTY = frozenset(
    (
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(Tensor.new_empty, Tensor.new_empty_strided),
    )
)


class Constants:
    """Tensors that calls have made of nothing but numbers, as ``torch.arange(x.shape[1])``: the same again.

    A call counts from the first of those that its tensors come of, as what is a constant of a module's call may be an
    argument of another within::

        mask(x): t = arange(n) ── inner(t): u = t + 1        u is a constant of mask's call, and not of inner's
    """

    def __init__(self) -> None:
        self._origins: list[int] = []
        self._made: dict[int, tuple[Tensor, int]] = {}

    def begin(self) -> int:
        """The number of the next call."""
        return len(self._origins)

    def number_since(self, begin: int) -> int:
        """How many calls have come of no earlier ones."""
        return sum(origin >= begin for origin in self._origins[begin:])

    def has(self, content: Any, begin: int) -> bool:
        """Whether something comes of these calls alone."""
        return id(content) in self._made and self._made[id(content)][1] >= begin

    def adopt(self, tensor: Tensor) -> None:
        """A call that was answered as a whole has taken along what it made the first time."""
        self._made[id(tensor)] = tensor, len(self._origins)

    def note(self, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        """A call that only computes has been made on every rank, and has given `found`."""
        made, taken = tensors_in(found), tree.leaves((args, kwargs))
        if any(id(one) not in self._made for one in taken) or any(type(one) is not Tensor for one in made):
            return
        if not any(one.requires_grad for one in made):
            origin = min((self._made[id(one)][1] for one in taken), default=len(self._origins))
            self._origins.append(origin)
            self._made.update((id(one), (one, origin)) for one in made)


def compute_everywhere(recording: Recording, func: Any, kind: FunctionKind, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function on what every rank has."""
    if kind is FunctionKind.HOOKS and args[0].requires_grad and function_name(func) != "retain_grad":
        raise NotImplementedError(
            f"a hook is registered on the gradient of a tensor that every rank has, which one stage computes "
            f"({users_line()}): register it on what the first module gives, or read the tensor's grad after it"
        )
    if (
        kind in (FunctionKind.WRITES, FunctionKind.CALLS)
        or "out" in kwargs
        or (kind is FunctionKind.DRAWS and function_name(func).endswith("_"))
    ):
        if recording.provenance is not None:
            recording.provenance.is_known = False
        _before_write(recording, [*tensors_in(args[0] if args else ()), *tensors_in(kwargs.get("out"))])
    draw = None
    if kind is FunctionKind.DRAWS and not is_drawing_of_own(kwargs):
        if recording.recorder.has_replicas:
            refuse_drawn_weights(recording.tensors, func, drawn_into(func, args, kwargs))
        recording.seed_draw(recording.num_draws)
        draw = recording.num_draws
        recording.num_draws += 1
    elif kind is FunctionKind.DRAWS:
        recording.seeds.append(kwargs["generator"].initial_seed())
        if recording.provenance is not None:
            recording.provenance.is_known = False  # to draw again would move the generator on
    elif kind is FunctionKind.READS and function_name(func) in (
        "numpy",
        "__array__",
        "untyped_storage",
        "data_ptr",
    ):
        _before_write(recording, args[:1])
        recording.memory.exposed.add(memory_of(args[0]))
    elif _is_count(recording, func, args, kwargs):
        recording.counted.append(args[0])
    found = func(*args, **kwargs)
    if func in _EMPTY and "out" not in kwargs and found.layout is torch.strided:
        with torch.no_grad(), _torch.DisableTorchFunction():
            found.zero_()  # else it has other numbers on each rank, which compare what events capture
    if recording.constants is not None and kind is FunctionKind.COMPUTES:
        recording.constants.note(args, kwargs, found)
    if recording.provenance is not None:
        recording.provenance.note_call(func, args, kwargs, found, draw)
    made = found if isinstance(found, (tuple, list)) else (found,)
    if made and isinstance(made[0], Tensor) and args and isinstance(args[0], Tensor) and made[0] is not args[0]:
        memory = memory_of(made[0])
        if memory == memory_of(args[0]):
            recording.memory.note_views(memory, (*made, args[0]))
    return found


def _is_count(recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call increases a tensor of the module by one."""
    is_one = func is Tensor.add_ and not kwargs and type(args[1]) is int and args[1] == 1
    return is_one and recording.tensors.number_of(args[0]) is not None


def count(recording: Recording, counters: Sequence[Tensor]) -> bool:
    """Increase tensors of the module by one, each as a call of its own would, if no stage has a use for them.

    Returns whether it has: else nothing is done.
    """
    recorder = recording.recorder
    with _torch.DisableTorchFunction():
        memories = set(map(_torch.storage_id, counters))
    if not (
        memories.isdisjoint(recorder.used)
        and memories.isdisjoint(recording.memory.copied)
        and all(one.memory.captures_none_of(memories, one.captured) for one in recorder.recordings)
    ):
        return False
    if recording.provenance is not None:
        recording.provenance.is_known = False
    with _torch.DisableTorchFunction():
        _torch.foreach_add_([*counters], 1)
    recording.counted.extend(counters)
    recording.num_aside += len(counters)
    return True


def _before_write(recording: Recording, tensors: Sequence[Tensor]) -> None:
    """Prepare for every rank to write into tensors that stages may have yet to use as they are now."""
    for tensor in tensors:
        memory = memory_of(tensor)
        if memory in recording.memory.copied:
            continue
        earlier = [one for one in recording.recorder.recordings if one is not recording]
        number = recording.recorder.used.get(memory)
        is_buffer = number is not None and memory_of(recording.tensors.tensors[number]) == memory
        if is_buffer or any(one.memory.places_of(memory, one.captured) for one in earlier):
            recording.recorder.note_changing(memory, tensor)
            is_used = is_buffer and any(-1 - number in event.inputs for event in recording.event.path())  # type: ignore[operator]
            recording.is_simple &= not is_used
            recording.data_source.finish_before(recording, with_own=is_used)
            recording.recorder.recordings[:] = [recording]
            recording.memory.copied |= {memory}
            recording.event.children.clear()  # they use the buffer as it was
            recording.event.shortcuts = None
        for place in recording.memory.places_of(memory, recording.captured):
            recording.copy_captured(place)
        recording.memory.forget_places(memory)
