"""Calls of autograd within a step: hooks on gradients, ``.grad``, `torch.autograd.grad` and backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeline.partition.differentiation import Graph
from lightning_pipeline.partition.functions import function_name
from lightning_pipeline.partition.hooks import hook_of_tensor, retained
from lightning_pipeline.partition.matcher import UNLIKE, never
from lightning_pipeline.partition.operation import tensors_in
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.users_line import users_line

if TYPE_CHECKING:
    from lightning_pipeline.partition.recorder import Recorder
    from lightning_pipeline.partition.recording import Recording

GETTERS = tuple(getattr(Tensor, name).__get__ for name in ("grad", "_grad"))
"""The functions by which a tensor's gradient is read."""


def hook(recording: Recording, func: Any, tensor: Tensor, function: Callable[..., Any] | None = None) -> Any:
    """Answer `register_hook`, `retain_grad`, and others of their kind."""
    recording.is_simple = False
    if recording.recorder.tensors.number_of(tensor) is not None or type(tensor) is not Placeholder:
        with torch._C.DisableTorchFunction():
            return func(tensor) if function is None else func(tensor, function)
    if not tensor.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            return func(tensor) if function is None else func(tensor, function)  # torch's own error
    name = function_name(func)
    if name == "retain_grad":
        if not tensor.is_leaf:
            recording.retained.append((tensor.value, tensor))
            recording.__torch_function__(retained, (), (tensor,))
        return None
    if name != "register_hook" or function is None:
        raise NotImplementedError(
            f"{name} on what a stage computes is not supported within a step: use register_hook ({users_line()})"
        )
    return recording.register(hook_of_tensor, tensor, function)


def read_gradient(recording: Recording, tensor: Tensor) -> None:
    """Answer ``tensor.grad``: before its backward a value has none."""
    if recording.recorder.tensors.number_of(tensor) is not None or recording.has_run_backward:
        raise NotImplementedError(
            f"the gradient of {getattr(tensor, 'what', 'a parameter')} is read within a step: it is on one stage, "
            f"and other micro-batches' are not in it; read it in on_after_backward, or take torch.autograd.grad "
            f"({users_line()})"
        )


def differentiate(recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Answer `torch.autograd.grad`, or a backward, which has to be within one visit."""
    is_grad = func is torch.autograd.grad
    if not is_grad:
        recording.is_simple = False  # gradients of parameters add up in the order of micro-batches
        recording.has_run_backward = True
        for child in recording.event.children:
            found = child.matcher.match(func, args, kwargs, recording)
            if found is not UNLIKE:
                recording.event = child
                return found
    recorder = recording.recorder
    call, inputs, looks, state = recording.look_at(func, args, kwargs)
    values = {id(tensor): value for tensor, value in zip(call.tensors, inputs, strict=True)}
    outputs = tensors_in(args[0] if args else kwargs.get("outputs", kwargs.get("tensors")))
    graph = Graph(recording.event, recording.captured, [values.get(id(one)) for one in outputs])
    wanted = None
    if is_grad:
        wanted = [(values.get(id(one)), one) for one in tensors_in(args[1] if len(args) > 1 else kwargs["inputs"])]
    visits = graph.visits(wanted)
    if len(visits) != 1:
        shown = " and ".join(str(visit % recorder.num_stages) for visit in sorted(visits))
        modules = [_modules_of(recorder, visits[visit]) for visit in sorted(visits)]
        named = f" ({'; '.join(map(', '.join, modules))})" if all(modules) else ""
        raise NotImplementedError(
            f"{function_name(func)} goes back over what stages {shown} compute ({users_line()}): gradients within "
            f"a step can be had within one stage. Put these modules on one stage{named}, or differentiate with respect "
            f"to what its first module is given"
        )
    [visit] = visits
    result = graph.result(visit, func, call, inputs, looks, recorder.inference)
    event = recording.follow(func, call, inputs, looks, state, result, visit=visit, draws=False)
    if not is_grad:
        event.match = never
    return recording.answer(event, func, args, kwargs)


def _modules_of(recorder: Recorder, numbers: Sequence[int]) -> list[str]:
    """The names of the modules that have some of the module's tensors, in order."""
    names = [recorder.tensors.names[number][0].rpartition(".")[0] for number in numbers]
    return list(dict.fromkeys(name for name in names if name))
