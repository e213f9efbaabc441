"""The path of a step: events are added to it, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_pipeline.partition.memory import memory_of, views_of
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.inference import NOTHING, Result
from lightning_pipeline.recording.matcher import CAPTURED, UNLIKE, EarlierValue, HookTensor, torch_state
from lightning_pipeline.recording.operation import Call, take_apart

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


def mark(recording: Recording, function: Any, *args: Any) -> None:
    """Add a mark to the path: an event that is no call and runs nowhere."""
    for child in recording.event.children:
        if child.match(function, args, None, recording) is not UNLIKE:
            recording.event = child
            return
    call = take_apart(function, args, {})
    event = recording.event.followed_by(
        function, call, (), (), torch_state(), NOTHING, visit=-1, draws=False, line=users_line(), module_tensors=()
    )
    recording.placing.note(event)
    recording.event = event


def inspect(
    recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Call, list[int | HookTensor | EarlierValue | None], list[TensorSpec], tuple[bool, bool, Any]]:
    """Take a call apart. Returns it, what each of its tensors stands for, their specs, and the `torch_state`."""
    call = take_apart(func, args, kwargs)
    inputs = [recording.input_of(tensor) for tensor in call.tensors]
    return call, inputs, [TensorSpec.of(tensor) for tensor in call.tensors], torch_state()


def follow(
    recording: Recording, func: Any, call: Call, inputs: Any, specs: Any, state: Any, result: Result, **how: Any
) -> Event:
    """Add a new event after the last one."""
    call_tensors = call.tensors
    for slot, _ in result.writes:
        _check_written(recording, inputs[slot])
        if inputs[slot] is CAPTURED and memory_of(call.tensors[slot]) not in recording.memory.batch:
            recording.memory.note_views(memory_of(call.tensors[slot]), views_of(call.tensors[slot]))
    event = recording.event.followed_by(
        func, call, inputs, specs, state, result, line=users_line(), module_tensors=recording.tensors.tensors, **how
    )
    recording.placing.note(event)
    if recording.is_in_checkpoint:
        recording.note_in_checkpoint(event)
    if recording.beginning in recording.recorder.num_events:
        recording.recorder.num_events[recording.beginning] += 1
    for value, tensor in zip(inputs, call_tensors, strict=True):
        if _is_module_tensor(value) and recording.tensors.is_replicated(-1 - value):
            recording.recorder.used[memory_of(tensor)] = -1 - value
    note_written(recording, {-1 - inputs[slot] for slot, _ in result.writes if _is_module_tensor(inputs[slot])})
    return event


def note_written(recording: Recording, numbers: set[int]) -> None:
    """A stage writes into these tensors of the module, so that from now on stages alone compute with them."""
    if not numbers <= recording.tensors.written:
        recording.tensors.written |= numbers
        recording.recorder.forget_paths()


def _check_written(recording: Recording, value: Any) -> None:
    """Refuse writes into what was made in a hook, also through a view: a step may be over on one rank before others."""
    if isinstance(recording.placing.memory.of(value), HookTensor):
        raise NotImplementedError(
            f"a tensor that was made in a hook of what one stage holds is written into in a step ({users_line()}): "
            f"make it a buffer of the module, or write into it in a hook"
        )


def answer(recording: Recording, event: Event, func: Any, args: Any, kwargs: Any) -> Any:
    """Go on to an event with the call that it was made of. Returns the call's result."""
    found = event.matcher.match(func, args, kwargs, recording)
    assert found is not UNLIKE, event.name
    recording.event = event
    return found


def _is_module_tensor(value: Any) -> bool:
    return type(value) is int and value < 0
