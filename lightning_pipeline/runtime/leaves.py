"""`torch.autograd.grad` with respect to a value that has come to a visit as a leaf for each of its uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

_SIGNATURE = inspect.signature(torch.autograd.grad)


def by_leaves(leaves: Mapping[int, Sequence[Tensor]]) -> Callable[..., Any]:
    """`torch.autograd.grad` that adds up the gradients of a tensor's leaves, the last use's first, as autograd does.

    Args:
        leaves: by the tensor's id; those that are not in it, or have none, stand for themselves.
    """

    def grad(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        bound = _SIGNATURE.bind(*args, **kwargs)
        inputs = bound.arguments["inputs"]
        uses = [leaves.get(id(one)) or [one] for one in ([inputs] if isinstance(inputs, Tensor) else inputs)]
        bound.arguments["inputs"] = [leaf for own in uses for leaf in own]
        if any(len(own) > 1 for own in uses):
            bound.arguments["allow_unused"] = True  # a part of the uses
        found = iter(torch.autograd.grad(*bound.args, **bound.kwargs))
        return tuple(_sum([next(found) for _ in own]) for own in uses)

    return grad


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in reversed(parts) if part is not None]
    return reduce(add, present) if present else None
