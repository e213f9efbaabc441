"""Calls that a recorded path has not had at this point: each becomes a new event, on the visit that can run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition.gradient_hooks import REGISTERING
from lightning_pipeline.partition.placeholder import TensorSpec, higher_order_error
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, is_drawing_of_own
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.compiled_calls import CompiledCall
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.inference import Result, written_by_array
from lightning_pipeline.recording.matcher import CAPTURED, UNLIKE, EarlierValue, never
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.operation import Call, take_apart
from lightning_pipeline.recording.path import answer, follow, inspect
from lightning_pipeline.recording.python_state import Unclear
from lightning_pipeline.recording.reading import result_on_data
from lightning_pipeline.recording.split_modules import SplitCall
from lightning_pipeline.recording.step_gradients import given, refuse_update
from lightning_pipeline.recording.view_writes import bring_base, come_together, sharers_of, tell_sharers

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


_WITHOUT_DATA = ("data.__set__", "requires_grad_", "requires_grad.__set__")
"""Functions that change a tensor and not what is in its memory."""


def add_call(recording: Recording, func: Any, kind: FunctionKind, args: Any, kwargs: dict[str, Any]) -> Any:
    """Add an event for a call that the path has not had here, if it has not. Returns the call's result."""
    for child in recording.event.children:
        if child.sharers and (found := child.matcher.match(func, args, kwargs, recording)) is not UNLIKE:
            return _after_write(recording, child, func, args, kwargs, found)
    _refuse(func, kwargs)
    call, inputs, specs, state = inspect(recording, func, args, kwargs)
    result = recording.recorder.result(func, call, specs, state)
    depends = result is None  # on data
    if result is None:
        _refuse_dependence(func)
        result = result_on_data(recording, func, call, specs)
    elif result.writes and type(func) is CompiledCall:
        raise Unclear("it writes into its arguments")
    for slot, _ in result.writes:
        if inputs[slot] is CAPTURED and (number := recording.tensors.number_of(call.tensors[slot])) is not None:
            inputs[slot] = -1 - number
    _refuse_resizing(recording, func, inputs, specs, result)
    is_making = recording.changes is not None and recording.changes.is_making
    if given.names and result.writes and not is_making:
        _refuse_update(recording, inputs, result)
    if depends:
        for child in recording.event.children:
            if child.result == result:
                found = child.matcher.match(func, args, kwargs, recording)
                if found is not UNLIKE:
                    recording.event = child
                    return found
    refuse_graph_of_earlier(call, inputs, specs, result)
    if function_name(func) == "data.__set__" and _has_that_data(recording, inputs):
        return None
    visit = _visit_for(recording, func, inputs, specs, result)
    sharers = []
    if result.writes and function_name(func) not in _WITHOUT_DATA:
        _refuse_overlapping(recording, inputs, result)
        sharers = sharers_of(recording, inputs, result)
        come = bring_base(recording, visit, call.tensors, inputs, result)
        if come or come_together(recording, visit, inputs, result, sharers):
            return add_call(recording, func, kind, args, kwargs)
    if type(func) is SplitCall:
        draws = args[1] in func.drawing
    else:
        draws = result.draws > 0 or (kind is FunctionKind.DRAWS and not is_drawing_of_own(kwargs))
    if draws and recording.recorder.has_replicas:
        for slot, _ in result.writes:
            refuse_drawn_weights(recording.tensors, func, call.tensors[slot])
    event = follow(recording, func, call, inputs, specs, state, result, visit=visit, draws=draws)
    if sharers:
        event.sharers, event.match = sharers, never
        return _after_write(recording, event, func, args, kwargs, answer(recording, event, func, args, kwargs))
    recording.num_aside -= 1
    if depends:
        event.match = never
    return answer(recording, event, func, args, kwargs)


def _after_write(recording: Recording, event: Event, func: Any, args: Any, kwargs: dict[str, Any], found: Any) -> Any:
    """Go on to an event that has written into memory which others share. Returns the call's result, `found`."""
    recording.event = event
    tell_sharers(recording, event, take_apart(func, args, kwargs).tensors)
    return found


def _has_that_data(recording: Recording, inputs: Sequence[Any]) -> bool:
    """Whether a tensor has the data already that it is given, as at the end of ``x.data *= 2``."""
    if not all(type(value) is int and value >= 0 for value in inputs):
        return False
    views = recording.placing.views
    tensor, given = (views.with_same_data(views.tensor_of(value)) for value in inputs)
    return tensor == given and not views.has_parted(tensor)


def _refuse(func: Any, kwargs: dict[str, Any]) -> None:
    if is_drawing_of_own(kwargs):
        raise NotImplementedError(
            f"{function_name(func)} draws from a generator of the user's for what a stage computes, where the other "
            f"ranks' generators would not advance ({users_line()}): draw with torch.rand or torch.randn of that shape "
            f"and generator, which all ranks do alike, and compute with it, or use the global generator"
        )
    if isinstance(func, _torch.HigherOrderOperator):
        raise higher_order_error(func)


def _refuse_update(recording: Recording, inputs: Sequence[Any], result: Result) -> None:
    """Refuse a call that writes into a parameter whose gradient the step has read."""
    memory = recording.placing.memory
    for slot, _ in result.writes:
        number = memory.module_tensor(inputs[slot])
        if number is not None and not given.names.isdisjoint(recording.tensors.names[number]):
            refuse_update()


def _refuse_resizing(
    recording: Recording, func: Any, inputs: Sequence[Any], specs: Sequence[TensorSpec], result: Result
) -> None:
    """Refuse a call that gives a tensor of the module another shape, beside `.data = ...`: other ranks have it, too."""
    for slot, spec in result.writes:
        value = inputs[slot]
        is_resized = type(value) is int and value < 0 and spec.shape != specs[slot].shape
        if is_resized and function_name(func) not in _WITHOUT_DATA:
            raise NotImplementedError(
                f"{function_name(func)} gives {recording.tensors.names[-1 - value][0]} another shape in a step "
                f"({users_line()}), while other ranks have it as it was: give it that shape before the run, as one "
                f"forward on sample data does; quantize-aware training may take observers per tensor"
            )


def _refuse_overlapping(recording: Recording, inputs: Sequence[Any], result: Result) -> None:
    """Refuse a write into a tensor of the batch which the first stage has, and which overlaps with others there."""
    views = recording.placing.views
    for slot, _ in result.writes:
        value = inputs[slot]
        if type(value) is int and value >= 0 and views.first_of(views.tensor_of(value)) in recording.overlapping:
            raise NotImplementedError(
                f"a tensor of the batch is written into which shares its memory with another one ({users_line()}): "
                f"write into a clone()"
            )


def _refuse_dependence(func: Any) -> None:
    """Refuse calls that cannot be inferred on data, either."""
    if type(func) is CompiledCall:
        raise Unclear("its result depends on data")
    if type(func) is SplitCall:
        raise NotImplementedError(
            f"what {func.__name__} gives cannot be known before it runs ({users_line()}): give modules that "
            f"parallelize_module has split no data that the shapes of their results depend on"
        )


def refuse_graph_of_earlier(
    call: Call, inputs: Sequence[Any], specs: Sequence[TensorSpec], result: Result | None = None
) -> None:
    """Refuse a call that would continue the graph of an earlier micro-batch, or run backward through it.

    Args:
        result: of the call; None for one that runs backward.
    """
    if result is not None:
        made = (one for one in result.tensors if isinstance(one, TensorSpec))
        if not any(spec.requires_grad for spec in (*made, *(spec for _, spec in result.writes))):
            return
    if not torch.is_grad_enabled():
        return
    for tensor, value, spec in zip(call.tensors, inputs, specs, strict=True):
        if type(value) is EarlierValue and spec.requires_grad and not spec.is_leaf:
            raise RuntimeError(
                f"{getattr(tensor, 'what', 'a value')} belongs to an earlier micro-batch, whose graph is gone when its "
                f"backward has run, and is used in another one ({users_line()}): keep it detached, as in value.detach()"
            )


def _visit_for(
    recording: Recording, func: Any, inputs: Sequence[Any], specs: Sequence[TensorSpec], result: Result
) -> int:
    placing = recording.placing
    if func in REGISTERING or func is written_by_array:
        visit = placing.home(inputs[0])
        if func is written_by_array and placing.last_read(inputs[0]) > visit:
            raise NotImplementedError(
                f"an array that shares its memory with what a stage computes is written into, when a later stage "
                f"has used that already (before {users_line()}): write into .numpy().copy()"
            )
    else:
        visit = placing.visit_of(inputs, result, recording.recorder.calls.stage)
    for value, spec in zip(inputs, specs, strict=True):
        if spec.stride is None and type(value) is int and value >= 0 and placing.home(value) != visit:
            raise NotImplementedError(
                f"a sparse tensor would go from one stage to another, for {function_name(func)} ({users_line()}): "
                f"make it dense with to_dense() where it is made, or keep both on one stage"
            )
    return visit


def refuse_drawn_weights(tensors: ModuleTensors, func: Any, drawn: Any) -> None:
    """Refuse a draw of random numbers into one of the module's tensors in a step, where there are replicas."""
    number = tensors.number_of(drawn) if isinstance(drawn, Tensor) else None
    if number is not None:
        raise NotImplementedError(
            f"{function_name(func)} draws random numbers into {tensors.names[number][0]} in a step ({users_line()}), "
            f"and each replica would draw others: do it in a hook, such as on_train_batch_start"
        )
