"""Tensors that every rank has become values of the stage that writes into them.

The Python object stays, and is a placeholder from then on. What calls were given before is theirs to keep::

    h + table              the call has captured `table`
    table.copy_(h.mean())  it now has another object with that data, `table` is the value that copy_ makes

An earlier micro-batch, which its stages may have yet to run, gets a copy: the memory is written into before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import copied, memory_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, become, placeholder
from lightning_pipeline.partition.users_code import users_line

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


def absorb(recording: Recording, tensor: Tensor, spec: TensorSpec, value: int, what: str) -> None:
    """Make a tensor that every rank had, and a stage has written into, a value of that stage."""
    _take_along_views(recording, tensor)
    if recording.memory.is_shared(tensor):
        refuse_shared()
    _become_value(recording, tensor, spec, value, what)


def refuse_shared() -> NoReturn:
    """Refuse a write that others would miss."""
    raise NotImplementedError(
        f"what a stage computes is written into a tensor that every rank has and that shares its memory with another "
        f"one, a view or an array, which would not see it ({users_line()}): write into a clone(), or where it is a "
        f"view or the .data of a buffer of the module, into the buffer itself under no_grad, and make views of it anew "
        f"in each step"
    )


def stand_for(recording: Recording, tensor: Tensor, made: Placeholder) -> None:
    """Make a tensor that every rank had stand for a value of a stage."""
    _become_value(recording, tensor, made._pl_spec, made._pl_value, made._pl_what)


def _become_value(recording: Recording, tensor: Tensor, spec: TensorSpec, value: int, what: str) -> None:
    _leave_data(recording, tensor, copy=False)
    for earlier in recording.recorder.recordings:
        if earlier is not recording:
            _leave_data(earlier, tensor, copy=True)
    become(tensor, placeholder(spec, what))
    found: Any = tensor
    found._pl_value, found._pl_recording = value, recording
    recording.kept.append(found)


def _leave_data(recording: Recording, tensor: Tensor, *, copy: bool) -> None:
    """Give the calls that have captured a tensor its data in an object of their own."""
    places = [index for index, captured in enumerate(recording.captured) if captured is tensor]
    if not places:
        return
    with _torch.DisableTorchFunction():
        before = copied(tensor) if copy else tensor.detach()
        if tensor.requires_grad and tensor.is_leaf:
            before.requires_grad_()
            recording.moved_leaves.append((before, tensor, tensor.grad))
    if not copy:
        recording.overwritten.add(id(before))
    for index in places:
        recording.captured[index] = before


def _take_along_views(recording: Recording, tensor: Tensor) -> None:
    """Before a stage writes into a tensor: let go of views that calls were given, and perhaps nobody else has."""
    memory, captured = memory_of(tensor), recording.captured
    with _torch.DisableTorchFunction():
        for place in recording.memory.places_of(memory, captured):
            if captured[place] is not tensor:
                view = captured[place]
                captured[place] = view.clone() if view.requires_grad else copied(view)
        for place, view in recording.copied_from.items():
            if memory_of(view) == memory:
                recording.copied_from[place] = view.detach()
