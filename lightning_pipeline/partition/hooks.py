"""Forward hooks of leaves: what those inside are given, and those that split a leaf over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


def user_hooks(module: nn.Module) -> list[tuple[int, Any]]:
    """A module's forward hooks with their keys, but for those by which torch splits it over ranks."""
    return [(key, hook) for key, hook in module._forward_hooks.items() if not _splits(hook)]


def is_split(module: nn.Module) -> bool:
    """Whether the module itself, not one inside, is split over ranks."""
    return any(map(_splits, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())))


@contextmanager
def splitting_inside(module: nn.Module) -> Iterator[None]:
    """While entered, the hooks by which torch splits a leaf over ranks (`parallelize_module`) run within its forward:
    what they give it and take from it are DTensors, which no other stage has to know."""
    homes = (module._forward_pre_hooks, module._forward_hooks)
    pre, post = taken = tuple([(key, hook) for key, hook in home.items() if _splits(hook)] for home in homes)
    forward, own = module.forward, vars(module).get("forward")

    def split(*args: Any, **kwargs: Any) -> Any:
        for key, hook in pre:
            if key in module._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
            else:
                given = hook(module, args)
                args = args if given is None else given if isinstance(given, tuple) else (given,)
        output = forward(*args, **kwargs)
        for key, hook in post:
            with_kwargs = key in module._forward_hooks_with_kwargs
            changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
            output = output if changed is None else changed
        return output

    for home, hooks in zip(homes, taken, strict=True):
        for key, _ in hooks:
            del home[key]
    vars(module)["forward"] = split
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
        for home, hooks in zip(homes, taken, strict=True):
            for key, hook in reversed(hooks):
                home[key] = hook
                home.move_to_end(key, last=False)  # type: ignore[attr-defined]


def call_hooks(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Run the forward hooks of a module that is not called here itself."""
    for key, hook in user_hooks(module):
        if key in module._forward_hooks_with_kwargs:
            hook(module, args, kwargs, output)
        else:
            hook(module, args, output)


def _splits(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.tensor")
