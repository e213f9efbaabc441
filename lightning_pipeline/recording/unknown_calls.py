"""Calls that no event on the known path matches: what becomes of each kind of function.

tensors of a stage?  no ──► computed on every rank alike (`everywhere`)
                     yes ─► described, read (`reading`), hooked or differentiated (`autograd_calls`),
                            called back (`python_again`) or, usually, a new event (`new_events`)
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.comparisons import REFLECTED, is_never_equal, unreflected
from lightning_pipeline.partition.kept_parameters import in_their_places, is_kept
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, describe
from lightning_pipeline.partition.replaced_functions import opened
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, kind_of
from lightning_pipeline.recording import autograd_calls, one_rank
from lightning_pipeline.recording.contexts import refuse_transforms
from lightning_pipeline.recording.everywhere import compute_everywhere
from lightning_pipeline.recording.function_calls import are_hooked_by_module
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.new_events import add_call
from lightning_pipeline.recording.operation import with_index_of_tensors
from lightning_pipeline.recording.reading import call_back, read
from lightning_pipeline.recording.split_modules import SplitCall, refuse_split
from lightning_pipeline.recording.step_gradients import GETTERS, GRADIENT_CALLS, UNANSWERED, given
from lightning_pipeline.recording.tensor_copies import deep_copy

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


def follow_unknown(recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record a call that the path has not seen here before, or answer it. Returns its result."""
    if recording.tensors.are_in_slices and any(map(is_kept, tree.leaves((args, kwargs)))):
        return recording.__torch_function__(func, (), *in_their_places(args, kwargs))
    kind = kind_of(func)
    if kind is FunctionKind.DESCRIBES:
        return describe(func, args, kwargs)
    if is_never_equal(func, args):
        return NotImplemented
    recording.num_aside += 1  # unless it becomes an event, below
    if func in GRADIENT_CALLS:
        found = recording.gradients.answer(func, args, recording.tensors)
        if found is not UNANSWERED:
            if recording.changes is not None and isinstance(found, Tensor):
                recording.changes.note_free(found)
            return found
    if given:
        given.check(func, kind, args, kwargs)
    if recording.changes is not None:
        again = partial(recording.__torch_function__, func, (), args, kwargs)
        found = recording.changes.make(func, kind, args, kwargs, again)
        if found is not UNANSWERED:
            return found
    if kind is FunctionKind.GRAD_MODE or kind is FunctionKind.ENTERED:
        return func(*args, **kwargs)
    if kind is FunctionKind.WRITES and autograd_calls.is_switch(recording, func, args):
        return autograd_calls.switch(recording, *args, **kwargs)
    if recording.checkpoints.depth and kind is FunctionKind.WRITES and _is_of_module(args, recording.tensors):
        pass  # an event, as the recomputation on its stage writes again
    elif are_hooked_by_module(func, args):
        pass  # an event, as gradients of a batch's tensor pass the module's hooks on its stage
    elif not _takes_ours(recording, func, args, kwargs):
        if recording.has_run_backward and func in GETTERS and args[0].requires_grad:
            return autograd_calls.read_gradient(recording, *args)
        found = compute_everywhere(recording, func, kind, args, kwargs)
        if recording.changes is not None:
            recording.changes.note(func, kind, args, kwargs, found)
        return found
    if function_name(func) in ("__getitem__", "__setitem__"):
        indexed = with_index_of_tensors(args)
        if indexed is None and not recording.is_ours(args[:1]):
            indexed = _with_index_of_numbers(recording, args)
        if indexed is not None:
            return recording.__torch_function__(func, (), indexed, kwargs)
    if func in REFLECTED:
        once, operands = unreflected(func, args, partial(_place, recording))
        if operands is not args:
            return recording.__torch_function__(once, (), operands, kwargs)
    if recording.tensors.split_calls and type(func) is not SplitCall:
        refuse_split(func, args, kwargs)
    if recording.rank_asked_at:
        one_rank.refuse_by_one_rank(recording)
    if kind is FunctionKind.PRINTS or kind is FunctionKind.READS:
        return read(recording, func, args, kwargs)
    if kind is FunctionKind.CALLS:
        return call_back(recording, func, args, kwargs)
    if func is Tensor.__deepcopy__:
        return deep_copy(recording, *args)
    refuse_transforms(func)
    if kind is FunctionKind.HOOKS:
        return autograd_calls.hook(recording, func, *args, **kwargs)
    if kind is FunctionKind.BACKWARD:
        return autograd_calls.differentiate(recording, func, args, kwargs)
    if func in GETTERS:
        return autograd_calls.read_gradient(recording, *args)
    if (inner := opened(func)) is not None:
        with recording:
            return inner(*args, **kwargs)
    return add_call(recording, func, kind, args, kwargs)


def _takes_ours(recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call takes what not every rank has."""
    if func is Tensor.__deepcopy__:
        return recording.is_ours(args[:1])  # the memo has copies of other tensors
    return recording.is_ours(args) or bool(kwargs and recording.is_ours(tuple(kwargs.values())))


def _with_index_of_numbers(recording: Recording, args: Any) -> Any:
    """The arguments of a call that indexes what every rank has, with numbers in place of integers that stages compute;
    None if there are none. Torch reads them as well, and what it gives for them is a view.
    """
    index = args[1]
    parts = index if isinstance(index, tuple) else (index,)
    if not any(_is_integer(part) for part in parts):
        return None
    made = tuple(
        recording.__torch_function__(Tensor.item, (), (part,), {}) if _is_integer(part) else part for part in parts
    )
    return (args[0], made if isinstance(index, tuple) else made[0], *args[2:])


def _is_integer(part: Any) -> bool:
    return type(part) is Placeholder and not part.shape and part.dtype in _INTEGERS


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _place(recording: Recording, tensor: Tensor) -> tuple[int, ...]:
    """What some ranks hold comes before what stages compute."""
    held, number = holders_of(tensor), recording.tensors.number_of(tensor)
    return (-1 - number,) if number is not None else (1,) if held is None else (0, *held)


def _is_of_module(args: Any, tensors: ModuleTensors) -> bool:
    """Whether the first argument is a tensor of the module."""
    return bool(args) and isinstance(args[0], Tensor) and tensors.number_of(args[0]) is not None
