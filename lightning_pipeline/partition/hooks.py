"""Seeing what forward hooks inside a leaf are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

HookCall = tuple[str, tuple[Any, Any, Any]]
"""A module's name, and the arguments, keyword arguments and output of its call."""


def note_calls(modules: Iterable[tuple[str, nn.Module]], calls: list[HookCall]) -> list[Any]:
    """Have each call of `modules` noted in `calls` before their own hooks run; returns the handles to remove."""
    handles = []
    for name, module in modules:

        def note(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            calls.append((name, (args, kwargs, output)))

        handles.append(module.register_forward_hook(note, with_kwargs=True, prepend=True))
    return handles


def call_hooks(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Run the forward hooks of a module that is not called here itself."""
    for key, hook in list(module._forward_hooks.items()):
        if key in module._forward_hooks_with_kwargs:
            hook(module, args, kwargs, output)
        else:
            hook(module, args, output)
