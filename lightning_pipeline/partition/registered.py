"""Hooks that the step itself registers on modules, apart for each of several virtual stages of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Hook = tuple[dict[int, Callable[..., Any]], int, Callable[..., Any]]
"""A module's dictionary of hooks, the hook's key in it, and the hook."""


class StageHooks:
    """Takes from modules what one virtual stage's run of the step has registered, so that the others do not meet it.

    A step that registers its hooks in its first call does so on each virtual stage, and on modules that these share.

    Args:
        modules: all modules that a hook may be registered on.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._homes = [home for m in modules for home in (m._forward_pre_hooks, m._forward_hooks)]
        self._own: dict[int, list[Hook]] = {}
        self._next = 0

    def put(self, stage: int) -> None:
        """Before a run: the stage's own hooks are registered."""
        for home, key, hook in self._own.get(stage, ()):
            home[key] = hook
        self._next = RemovableHandle.next_id

    def take(self, stage: int) -> None:
        """After it: those that are still registered are taken back, and so are new ones."""
        own = [hook for hook in self._own.get(stage, ()) if hook[1] in hook[0]]
        if RemovableHandle.next_id != self._next:
            own += [(home, key, hook) for home in self._homes for key, hook in home.items() if key >= self._next]
        self._own[stage] = own
        _remove(own)

    def take_all(self) -> None:
        """Before a step: the last stage's hooks are taken back, where the user has not removed them."""
        if self._own:
            last = max(self._own)
            self._own[last] = [hook for hook in self._own[last] if hook[1] in hook[0]]
            _remove(self._own[last])

    def put_last(self) -> None:
        """After a step: the last stage's hooks stay registered."""
        if self._own:
            self.put(max(self._own))


def _remove(hooks: Sequence[Hook]) -> None:
    for home, key, _ in hooks:
        del home[key]
