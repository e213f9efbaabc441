"""Functions of lists of tensors, such as ``torch._foreach_add``, on lists whose tensors are on different ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_pipeline.hooks.operands import is_partial
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name
from lightning_pipeline.recording.operation import Call, take_apart


def run_by_holders(
    func: Any, args: Any, kwargs: dict[str, Any], compute: Callable[[Any, Call, str, FunctionKind], Any]
) -> Any:
    """Run a function of lists once for the elements that have the same holders.

    Args:
        compute: runs a call whose tensors some ranks hold.
    """
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    count = len(lists[0])
    groups: dict[Any, list[int]] = {}
    for index in range(count):
        held = tuple(holders_of(one[index]) for one in lists if isinstance(one[index], Tensor))
        groups.setdefault(held, []).append(index)
    found: list[Any] | None = None
    for indices in groups.values():

        def part(value: Any, indices: list[int] = indices) -> Any:
            if isinstance(value, (list, tuple)):
                return [value[index] for index in indices]
            if isinstance(value, Tensor) and value.dim() == 1 and len(value) == count and "addc" in func.__name__:
                return value[indices]
            return value

        own_args = [part(value) for value in args]
        own_kwargs = {key: part(value) for key, value in kwargs.items()}
        if is_partial(own_args) or is_partial(own_kwargs.values()):
            call = take_apart(func, own_args, own_kwargs)
            results = compute(func, call, function_name(func), FunctionKind.COMPUTES)
        else:
            results = func(*own_args, **own_kwargs)
        if results is not None:
            found = [None] * count if found is None else found
            for index, result in zip(indices, results, strict=True):
                found[index] = result
    return found
