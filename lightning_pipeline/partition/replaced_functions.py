"""Functions of torch that the user has replaced, as by ``F.softmax = sharpened(F.softmax)``.

Functions of torch that are written in Python give themselves to function modes by their global names. Where the user
has replaced one, the name means the user's, which runs already, and would run twice::

    F.softmax(x) ── the user's, x / 2 ── torch's ── the mode is given F.softmax, which is the user's ── x / 2 again
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function

from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.torch_functions import FunctionKind, is_torchs, kind_of, same_kind

_OWNERS = (F, torch.functional)
_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextmanager
def functions_as_torch_has_them() -> Iterator[None]:
    """While entered, modes are given torch's functions, and not what the user has put in their places."""
    with overridden() as override:
        for owner in _OWNERS:
            override(owner, "handle_torch_function", _handle)
        yield


def _handle(function: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_torchs(function):
        original = _function_of(sys._getframe(1).f_code)
        if kind_of(function) is not FunctionKind.COMPUTES:  # it had the name when functions were classified
            same_kind(original, function)
        function = original
    return handle_torch_function(function, *args, **kwargs)


_BY_CODE = {one.__code__: one for owner in _OWNERS for one in vars(owner).values() if isinstance(one, FunctionType)}


def _function_of(code: CodeType) -> Any:
    """The function that has this code."""
    if code not in _BY_CODE:  # it was replaced before this module was imported; it gives all arguments to modes
        owner = next(owner for owner in _OWNERS if owner.__file__ == code.co_filename)
        _BY_CODE[code] = FunctionType(code, vars(owner), code.co_name)
    return _BY_CODE[code]


def opened(func: Any) -> Any:
    """A function of torch's that calls one which the user has replaced, so that modes are given what it calls and not
    the function itself; None for all others.
    """
    if not isinstance(func, FunctionType) or func.__globals__ is not vars(F):
        return None
    called = (vars(F)[name] for name in func.__code__.co_names if name in vars(F) and name != func.__name__)
    if all(map(is_torchs, called)):
        return None
    scope = {**vars(F), **dict.fromkeys(_ASKS, _never)}
    made = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _never(*tensors: Any) -> bool:
    return False
