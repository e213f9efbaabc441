"""Running a module's code without a trace: what it changed on modules is put back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipeline.partition.placeholder import Placeholder, become

MAX_ITEMS = 1000
"""Longer lists, dictionaries and sets are tables, not what a step collects: their content is not looked after."""

_COLLECTIONS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))


@contextmanager
def left_as_it_was(root: nn.Module) -> Iterator[None]:
    """While entered, steps may run; afterwards buffers, attributes and collections of all modules are as before.

    Buffers and other tensors that a module keeps get their values back in place, and so do parameters that a step has
    been seen to write into (`about_to_write`), as the averages of a teacher are: a copy of every parameter would take
    as much memory as the model. Objects of the user's own keep what a step did to them.
    """
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    homes = [(vars(module), _contents(vars(module), kept)) for module in root.modules()]
    with torch._C.DisableTorchFunction():  # in a hook, where each rank has others, too
        data = [(parameter, parameter.detach()) for parameter in root.parameters() if _is_plain(parameter)]
    for parameter, _ in data:
        if parameter in _written:
            _keep(parameter, kept)
    _entered.append(kept)
    try:
        yield
    finally:
        _entered.pop()
        with torch._C.DisableTorchFunction():
            for parameter, data_before in data:
                if _is_plain(parameter) and parameter.data_ptr() != data_before.data_ptr():
                    parameter.data = data_before
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


def about_to_write(parameter: Tensor) -> None:
    """A step writes into a parameter, which is put back."""
    if _is_plain(parameter) and parameter not in _written:
        _written[parameter] = True
        for kept in _entered:
            _keep(parameter, kept)


_written = WeakIdKeyDictionary()
"""Parameters that steps write into."""
_entered: list[dict[int, tuple[Tensor, Tensor]]] = []
"""Of each `left_as_it_was` that is entered: tensors with their values before."""


def _is_plain(parameter: Tensor) -> bool:
    is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return is_plain and not parameter.is_meta and not isinstance(parameter, FakeTensor)


def _keep(tensor: Tensor, kept: dict[int, tuple[Tensor, Tensor]]) -> None:
    if id(tensor) not in kept:
        with torch._C.DisableTorchFunction() if isinstance(tensor, nn.Parameter) else nullcontext():
            kept[id(tensor)] = (tensor, tensor.detach().clone())


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
            if own and not item.is_meta:
                _keep(item, kept)
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
