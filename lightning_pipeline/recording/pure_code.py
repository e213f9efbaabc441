"""Proves, from their source, that forwards of the user's modules only compute.

A module whose forward is proven here is recorded as one event where it is called again, its Python left out. That is
sound if what the Python does follows from what is compared at each call, and if it leaves nothing behind:

    what a forward may use                    how it is known to be the same
    ----------------------                    ------------------------------
    its arguments, and what comes of them     compared by the caller (tensors by their specs)
    numbers, strings, ... on modules          identity of each attribute that is read
    parameters, buffers and modules within    identity of each
    globals, methods, other functions         identity, and proven themselves
    torch functions                           seen as events: the caller takes no call that made anything else

What is not listed is refused (`code_reader`): stores to anything but local names, closures, ``with``, ``try``,
generators, ``global``, lambdas, modules that are passed on as arguments. A refusal costs time and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn
from torch.backends import mha

from lightning_pipeline.partition.torch_functions import is_torchs
from lightning_pipeline.recording.code_reader import VALUE_NAMES, Impure, Item, is_plain, is_torch_function, uses_of


class Facts(NamedTuple):
    """What a proof rests on beside the plain attributes, parameters and children of its modules.

    Attributes:
        items: keys of mappings that still have to hold these objects.
        attributes: likewise attributes of classes and functions.
        absent: (mapping, key) that must not be there.
        names: that are read of modules or values, and so must not be attributes that the user has given a tensor.
    """

    items: list[Item]
    attributes: list[Item]
    absent: list[tuple[Mapping[str, Any], str]]
    names: set[str]


def facts_of(modules: Sequence[nn.Module], trusted: frozenset[type]) -> Facts:
    """What makes the forwards of these modules, one and all that is in it, pure.

    Args:
        trusted: classes whose own forwards only compute.

    Raises:
        Impure: it is not shown that they are.
    """
    facts = Facts([], [], [], set())
    for name in _MACHINERY:
        facts.attributes.append(Item(nn.Module, name, getattr(nn.Module, name)))
        if not is_torchs(getattr(nn.Module, name)):
            raise Impure("calls of modules are not as torch has them")
    by_class: dict[type, list[nn.Module]] = {}
    for module in modules:
        by_class.setdefault(type(module), []).append(module)
    pending: list[FunctionType] = []
    for cls, members in by_class.items():
        if cls in trusted:
            of_class, of_torch, names_read = _trusted(cls)
            facts.attributes.extend(of_class)
            facts.items.extend((*of_torch, *_settings_of(members, names_read)))
        elif cls not in _CONTAINERS:
            pending.append(_forward_of(cls, facts))
    done: set[FunctionType] = set()
    while pending:
        function = pending.pop()
        if function in done:
            continue
        done.add(function)
        facts.attributes.extend(Item(function, name, getattr(function, name)) for name in ("__code__", "__defaults__"))
        uses = uses_of(function)
        facts.items.extend(uses.items)
        facts.absent.extend(uses.absent)
        pending.extend(uses.functions)
        for name in uses.attributes - facts.names:
            facts.names.add(name)
            for cls, members in by_class.items():
                pending.extend(_resolve(name, cls, members, facts, is_torchs=cls in trusted or cls in _CONTAINERS))
            if name not in VALUE_NAMES and not any(_has(module, name) for module in modules):
                raise Impure(f"no module has {name}")
    return facts


def _has(module: nn.Module, name: str) -> bool:
    held = (vars(module), module._parameters, module._buffers, module._modules)
    return any(name in one for one in held) or hasattr(type(module), name)


@lru_cache(maxsize=256)
def _trusted(cls: type) -> tuple[list[Item], list[Item], frozenset[str]]:
    """What a class of torch's computes with: its functions, those of `torch.nn.functional` that these call, and the
    names that they use.
    """
    functions = {
        name: value
        for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)])
        for name, value in vars(base).items()
        if type(value) is FunctionType and name != "__init__"
    }
    functions |= {name: getattr(cls, name) for name in _MACHINERY}
    names = frozenset(name for function in functions.values() for name in function.__code__.co_names)
    called = {name: value for name, value in vars(F).items() if name in names}
    if not all(map(is_torchs, (*functions.values(), *called.values()))):
        raise Impure(f"{cls.__name__}, or torch.nn.functional, is not as torch has it")
    of_class = [Item(cls, name, value) for name, value in functions.items()]
    return of_class, [Item(vars(F), name, value) for name, value in called.items()], names | functions.keys()


_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "forward", "_call_impl"))
"""Attributes that are compared anyhow; the last two may be this package's."""


def _settings_of(modules: Iterable[nn.Module], names_read: frozenset[str]) -> list[Item]:
    """What forwards of torch's own modules decide by beside plain attributes: the flag of fast attention, and functions
    that they have been given, as the activation of a transformer's layer.

    Args:
        names_read: what the forwards read, and the names of the methods.
    """
    found = [Item(vars(mha), "_is_fastpath_enabled", vars(mha)["_is_fastpath_enabled"])]
    for module in modules:
        own = vars(module)
        for name in names_read & own.keys() - _OF_EVERY_MODULE:
            value = own[name]
            is_for_others = name == "_reversed_padding_repeated_twice" and own.get("padding_mode") == "zeros"
            if is_plain(value) or is_for_others:
                continue
            if not is_torch_function(value) or hasattr(type(module), name):
                raise Impure(f"{type(module).__name__}.{name} may change within")
            found.append(Item(own, name, value))
    return found


_CONTAINERS = frozenset((nn.ModuleList, nn.ModuleDict))
_UNUSED = frozenset(
    (
        *("__init__", "__repr__", "__str__", "__setattr__", "__delattr__", "__dir__", "__del__"),
        *("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    )
)
"""Methods that nothing calls which a forward may do."""
_MACHINERY = ("__call__", "__getattr__", "_call_impl", "_wrapped_call_impl")
"""What a call of a module goes through, and the look-up of its parameters."""


def _forward_of(cls: type, facts: Facts) -> FunctionType:
    forward = inspect.getattr_static(cls, "forward")
    is_plain = all(getattr(cls, name) is getattr(nn.Module, name) for name in _MACHINERY)
    if type(forward) is not FunctionType or not is_plain or cls.__getattribute__ is not object.__getattribute__:
        raise Impure(f"calls of {cls.__name__} are not those of nn.Module")
    members = [member for base in cls.__mro__ for member in vars(base).items() if not is_torchs(member[1])]
    if any(callable(value) and name.startswith("__") and name not in _UNUSED for name, value in members):
        raise Impure(f"{cls.__name__} has operators of its own")
    names = ("forward", "__getattribute__", *_MACHINERY)
    facts.attributes.extend(Item(cls, name, getattr(cls, name)) for name in names)
    return forward


def _resolve(
    name: str, cls: type, members: Iterable[nn.Module], facts: Facts, *, is_torchs: bool
) -> list[FunctionType]:
    """Note what a name is on the modules of a class. Returns the functions that are to be proven for it."""
    functions: list[FunctionType] = []
    of_class = inspect.getattr_static(cls, name, None)
    for module in members:
        own = vars(module)
        if name == "forward":
            continue  # of the class: an instance's own is refused
        if name in module._parameters or name in module._buffers or name in module._modules:
            # Whose identity is compared anyhow. They are looked up last.
            if name in own or of_class is not None:
                raise Impure(f"{cls.__name__}.{name} is hidden by another attribute")
            facts.absent.append((own, name))
            facts.absent.extend((vars(base), name) for base in cls.__mro__[: cls.__mro__.index(nn.Module)])
            continue
        if name in own:
            if hasattr(of_class, "__set__") or hasattr(of_class, "__delete__"):
                raise Impure(f"{cls.__name__}.{name} is looked up by a descriptor")
            value = own[name]
            if type(value) is FunctionType and not is_torch_function(value):
                functions.append(value)
            elif not is_plain(value) and not is_torch_function(value):
                raise Impure(f"{cls.__name__}.{name} may change within")
            facts.items.append(Item(own, name, value))
        elif of_class is not None:
            is_method = type(of_class) is FunctionType
            if is_method and not is_torchs and vars(nn.Module).get(name) is not of_class:
                functions.append(of_class)
            # Of torch's own methods, those with names of tensors' give parts, or change what is compared.
            elif not is_plain(of_class) and not (is_method and name in VALUE_NAMES):
                raise Impure(f"{cls.__name__}.{name} is more than a method or a number")
            facts.attributes.append(Item(cls, name, of_class))
            facts.absent.append((own, name))
    return functions
