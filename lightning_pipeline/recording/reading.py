"""Calls that need data of what stages compute: reads, prints, and functions whose results' shapes depend on data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import copied
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, refuse_memory
from lightning_pipeline.partition.torch_functions import (
    FunctionKind,
    function_name,
    is_laid_out_by_others,
    is_of_memory,
    kind_of,
)
from lightning_pipeline.recording.function_calls import weights_stood_in
from lightning_pipeline.recording.inference import Result
from lightning_pipeline.recording.matcher import CAPTURED, EarlierValue, HookTensor
from lightning_pipeline.recording.operation import Call, TensorSlot, put_together, take_apart
from lightning_pipeline.recording.tensor_copies import reduced

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


def read(recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that reads or prints, on data."""
    call = take_apart(func, args, kwargs)
    name = function_name(func)
    for tensor in call.tensors if is_of_memory(func) else ():
        if type(tensor) is Placeholder:
            refuse_memory(func, tensor)
    if name in ("numpy", "__array__") and args[0].requires_grad and not kwargs.get("force"):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    if kind_of(func) is FunctionKind.PRINTS and type(value := recording.input_of(args[0])) is int:
        recording.is_simple = False
        return recording.data_source.shown(recording, value, lambda tensor: func(tensor, *args[1:], **kwargs))
    data = data_of(recording, call)
    if func is Tensor.__reduce_ex__:
        return reduced(data[0], TensorSpec.of(args[0]), *args[1:])
    with _torch.DisableTorchFunction():
        found = func(*put_together(call.args, data, call.numbers), **put_together(call.kwargs, data, call.numbers))
    value = recording.value_of(args[0]) if args else None
    if value is not None and args[0].device.type == "cpu" and name in ("numpy", "__array__"):
        place = recording.placeholder_for(value, args[0]._pl_spec, args[0]._pl_what)
        recording.watch_array(found, found.tobytes(), place)
    return found


def call_back(recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `apply_` and the like: every rank calls the user's function with each element."""
    call = take_apart(func, args, kwargs)
    data = [copied(one) for one in data_of(recording, call)]
    with _torch.DisableTorchFunction():
        found = func(*put_together(call.args, data, call.numbers), **put_together(call.kwargs, data, call.numbers))
    return recording.record(Tensor.copy_, (args[0], found))


def result_on_data(recording: Recording, func: Any, call: Call, specs: Sequence[TensorSpec]) -> Result:
    """Infer the result of a function whose specs depend on data."""
    data = _known_data(recording, func, call, specs)
    if data is None:
        recording.is_simple = False
        data = data_of(recording, call)
    by_id = dict(zip(map(id, call.tensors), data, strict=True))
    with _torch.DisableTorchFunction(), weights_stood_in(call.args, by_id):
        return recording.recorder.inference.result_on_data(func, call, data, specs)


def _known_data(recording: Recording, func: Any, call: Call, specs: Sequence[TensorSpec]) -> list[Tensor] | None:
    """Data that suffices to infer a result without a read, as every rank has it; None if it does not suffice."""
    if not is_laid_out_by_others(func) or not call.args or type(call.args[0]) is not TensorSlot:
        return None
    laid_out = call.args[0].number
    found = []
    for slot, (tensor, spec) in enumerate(zip(call.tensors, specs, strict=True)):
        if slot == laid_out:
            with _torch.DisableTorchFunction():
                found.append(torch.zeros((), dtype=spec.dtype, device=spec.device).expand(spec.shape))
        elif type(tensor) is not Placeholder and recording.input_of(tensor) is CAPTURED:
            found.append(tensor)
        else:
            return None
    return found


def data_of(recording: Recording, call: Call) -> list[Tensor]:
    """The data of a call's tensors, which ranks send to each other."""
    inputs = [recording.input_of(tensor) for tensor in call.tensors]
    values = [value for value in inputs if type(value) is int and value >= 0]
    held = {
        id(tensor): tensor
        for tensor, value in zip(call.tensors, inputs, strict=True)
        if isinstance(value, HookTensor)
        or (type(value) is int and value < 0 and not recording.tensors.is_replicated(-1 - value))
    }
    found: dict[Any, Tensor] = {}
    for tensor, value in zip(call.tensors, inputs, strict=True):
        if type(value) is EarlierValue:
            recording.is_simple = False
            [found[id(tensor)]] = recording.data_source.read(tensor._pl_recording, [tensor._pl_value])  # type: ignore[attr-defined]
    if values:
        recording.reads += values
        found.update(zip(values, recording.data_source.read(recording, values), strict=True))
    if held:
        numbers = [recording.tensors.number_of(tensor) for tensor in held.values()]
        recording.module_reads += [number for number in numbers if number is not None]
        recording.is_simple &= None not in numbers
        if not recording.tensors.written.isdisjoint(numbers):
            recording.is_simple = False
            recording.data_source.finish_before(recording, with_own=True)
        found.update(zip(held, recording.data_source.read_held(list(held.values())), strict=True))
    return [
        found.get(value if type(value) is int and value >= 0 else id(tensor), tensor)
        for tensor, value in zip(call.tensors, inputs, strict=True)
    ]
