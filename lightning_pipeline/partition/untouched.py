"""Running a module's code without a trace: what it changed on modules is put back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.placeholder import Placeholder, become

MAX_ITEMS = 1000
"""Longer lists, dictionaries and sets are tables, not what a step collects: their content is not looked after."""

_COLLECTIONS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))


@contextmanager
def left_as_it_was(root: nn.Module) -> Iterator[None]:
    """While entered, steps may run; afterwards buffers, attributes and collections of all modules are as before.

    Buffers and other tensors that a module keeps get their values back in place. Parameters are not looked after: a
    step without an optimizer changes none. Objects of the user's own keep what a step did to them.
    """
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    homes = [(vars(module), _contents(vars(module), kept)) for module in root.modules()]
    try:
        yield
    finally:
        for home, before in homes:
            home.clear()
            for name, (value, content) in before.items():
                home[name] = value
                if content is not None:
                    _fill(value, content)
        with torch.no_grad():
            for tensor, values in kept.values():
                if type(tensor) is Placeholder:  # a step that was recorded has written into it
                    become(tensor, values)
                else:  # batch norm's kernels do not count their writes as versions
                    tensor.copy_(values)


def _contents(home: dict[str, Any], kept: dict[int, tuple[Tensor, Tensor]]) -> dict[str, tuple[Any, Any]]:
    """Each attribute with, of a collection, a copy of its content; tensors are added to `kept`."""
    found = {}
    for name, value in home.items():
        is_short = type(value) in _COLLECTIONS and len(value) <= MAX_ITEMS
        content = value.copy() if is_short else None
        found[name] = (value, content)
        items = [value] if content is None else list(content.values() if isinstance(content, dict) else content)
        for item in items:
            own = isinstance(item, Tensor) and not isinstance(item, nn.Parameter) and not item.is_inference()
            if own and not item.is_meta and id(item) not in kept:
                kept[id(item)] = (item, item.detach().clone())
    return found


def _fill(value: Any, content: Any) -> None:
    if isinstance(value, (list, deque)):
        same = len(value) == len(content) and all(a is b for a, b in zip(value, content, strict=True))
        if not same:
            value.clear()
            value.extend(content)
        return
    value.clear()
    value.update(content)
