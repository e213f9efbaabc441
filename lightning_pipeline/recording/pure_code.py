"""Proves, from their source, that forwards of the user's modules only compute.

A module whose forward is proven here is recorded as one event where it is called again, its Python left out. That is
sound if what the Python does follows from what is compared at each call, and if it leaves nothing behind:

    what a forward may use                    how it is known to be the same
    ----------------------                    ------------------------------
    its arguments, and what comes of them     compared by the caller (tensors by their specs)
    numbers, strings, ... on modules          identity of each attribute that is read
    parameters and modules within             identity of each
    globals, methods, other functions         identity, and proven themselves
    torch functions                           seen as events: the caller takes no call that made anything else

What is not listed is refused (`code_reader`): stores to anything but local names, closures, ``with``, ``try``,
generators, ``global``, lambdas, modules that are passed on as arguments. A refusal costs time and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from lightning_pipeline.recording.code_reader import Impure, Item, is_plain, is_torch_function, uses_of


class Facts(NamedTuple):
    """What a proof rests on beside the plain attributes, parameters and children of its modules.

    Attributes:
        items: keys of mappings that still have to hold these objects.
        attributes: likewise attributes of classes and functions.
        absent: (mapping, key) that must not be there.
    """

    items: list[Item]
    attributes: list[Item]
    absent: list[tuple[Mapping[str, Any], str]]


def facts_of(modules: Sequence[nn.Module], trusted: frozenset[type]) -> Facts:
    """What makes the forwards of these modules, one and all that is in it, pure.

    Args:
        trusted: classes whose own forwards only compute.

    Raises:
        Impure: it is not shown that they are.
    """
    children = frozenset(name for module in modules for name in module._modules)
    facts = Facts([], [], [])
    by_class: dict[type, list[nn.Module]] = {}
    for module in modules:
        by_class.setdefault(type(module), []).append(module)
    pending: list[tuple[FunctionType, bool]] = []
    for cls in by_class:
        if cls not in trusted and cls not in _CONTAINERS:
            pending.append((_forward_of(cls, facts), True))
    done: set[tuple[FunctionType, bool]] = set()
    names: set[str] = set()
    while pending:
        function, is_method = pending.pop()
        if (function, is_method) in done:
            continue
        done.add((function, is_method))
        facts.attributes.extend(Item(function, name, getattr(function, name)) for name in ("__code__", "__defaults__"))
        uses = uses_of(function, is_method, children)
        facts.items.extend(uses.items)
        facts.absent.extend(uses.absent)
        pending.extend((used, False) for used in uses.functions)
        for name in uses.attributes - names:
            names.add(name)
            for cls, members in by_class.items():
                pending.extend(_resolve(name, cls, members, facts, is_trusted=cls in trusted))
    return facts


_CONTAINERS = frozenset((nn.ModuleList, nn.ModuleDict))
_MACHINERY = ("__call__", "__getattr__", "_call_impl", "_wrapped_call_impl")
"""What a call of a module goes through, and the look-up of its parameters."""
_OF_CONTAINERS = frozenset(("__getitem__", "__iter__", "__len__", "items", "keys", "values"))


def _forward_of(cls: type, facts: Facts) -> FunctionType:
    forward = inspect.getattr_static(cls, "forward")
    is_plain = all(getattr(cls, name) is getattr(nn.Module, name) for name in _MACHINERY)
    if type(forward) is not FunctionType or not is_plain or cls.__getattribute__ is not object.__getattribute__:
        raise Impure(f"calls of {cls.__name__} are not those of nn.Module")
    names = ("forward", "__getattribute__", *_MACHINERY)
    facts.attributes.extend(Item(cls, name, getattr(cls, name)) for name in names)
    return forward


def _resolve(
    name: str, cls: type, members: Iterable[nn.Module], facts: Facts, *, is_trusted: bool
) -> list[tuple[FunctionType, bool]]:
    """Note what a name is on the modules of a class. Returns the functions that are to be proven for it."""
    functions: list[tuple[FunctionType, bool]] = []
    for module in members:
        own = vars(module)
        if name == "forward" or name in module._parameters or name in module._modules:
            continue  # whose identity is compared anyhow, and `forward` is of the class
        if name in own:
            value = own[name]
            if type(value) is FunctionType and not is_torch_function(value):
                functions.append((value, False))
            elif not is_plain(value) and not is_torch_function(value):
                raise Impure(f"{cls.__name__}.{name} may change within")
            facts.items.append(Item(own, name, value))
        elif hasattr(cls, name):
            value = inspect.getattr_static(cls, name)
            is_torchs = is_trusted or cls in _CONTAINERS
            if is_torchs and name in _OF_CONTAINERS:
                continue
            if type(value) is FunctionType and not is_torchs and vars(nn.Module).get(name) is not value:
                functions.append((value, True))
            elif not is_plain(value):
                raise Impure(f"{cls.__name__}.{name} is more than a method or a number")
            facts.attributes.append(Item(cls, name, value))
            facts.absent.append((own, name))
        elif name in module._buffers:
            raise Impure(f"{cls.__name__}.{name} is a buffer")
    return functions
