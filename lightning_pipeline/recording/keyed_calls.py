"""Calls of modules that stage_config names: while steps are recorded, the stage of the one that runs is known."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from lightning_pipeline.partition.overrides import InPlaceOf, has_forward, overridden
from lightning_pipeline.partition.stage_map import StageMap


class KeyedCalls:
    """Notes, while steps run, the calls of modules that have keys.

    Attributes:
        stage: of the module that runs, None where no key says one; and the lowest that it may have.
        name: of the innermost module with a key.
    """

    def __init__(self, root: nn.Module, stages: StageMap) -> None:
        self.stage: tuple[int | None, int] = (None, 0)
        self.name = ""
        self.stages = stages
        self.root = root
        self._thread = 0
        self._forwards: list[_Forward] | None = None
        self._names: dict[int, tuple[weakref.ref[nn.Module], list[str]]] = {}
        self._named()

    def forget(self) -> None:
        """The root has other modules than before."""
        self._forwards = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While entered, calls in this thread are noted."""
        self._thread = threading.get_ident()
        if self._forwards is None or not all(map(_Forward.is_current, self._forwards)):
            self._forwards = self._made()
        with overridden() as override:
            for forward in self._forwards:
                override(forward.module, "forward", forward.noted)
            yield

    def _made(self) -> list[_Forward]:
        found = []
        for name, module in self._named():
            if (name in self.stages.exact or name in self.stages.minimum) and has_forward(module):
                stage = self.stages.exact.get(name), self.stages.minimum.get(name, 0)
                own = vars(module).get("forward")
                noted = self._noted(name, stage, module, is_own=own is not None)
                found.append(_Forward(module, own, type(module).forward, noted))
        return found

    def _named(self) -> list[tuple[str, nn.Module]]:
        """The modules, by the names that each had when it came: a key stays with its module where lists are changed or
        layers wrapped.
        """
        names: dict[int, list[str]] = {}
        modules: dict[int, nn.Module] = {}
        for name, module in self.root.named_modules(remove_duplicate=False):
            modules[id(module)] = module
            names.setdefault(id(module), []).append(name)
        self._names = {key: known for key, known in self._names.items() if known[0]() is not None}
        for key, module in modules.items():
            self._names.setdefault(key, (weakref.ref(module), names[key]))
        return [(name, module) for key, module in modules.items() for name in self._names[key][1]]

    def _noted(
        self, name: str, stage: tuple[int | None, int], module: nn.Module, *, is_own: bool
    ) -> Callable[..., Any]:
        """What is called in place of a module's forward, and looks like it.

        Args:
            is_own: the instance has one of its own, beside its class's.
        """
        plain: Any = module.forward
        is_method = isinstance(plain, MethodType) and plain.__self__ is module
        function = plain.__func__ if is_method else lambda _, *args, **kwargs: plain(*args, **kwargs)

        def noted(of: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not is_own:
                caller = sys._getframe(1).f_locals.get("self")
                if caller is not of and isinstance(caller, nn.Module) and vars(caller).get("forward") is stand_in:
                    of = caller  # a shallow copy that a step has made
            if threading.get_ident() != self._thread:
                return function(of, *args, **kwargs)
            before = self.stage, self.name
            self.stage, self.name = stage, name
            try:
                return function(of, *args, **kwargs)
            finally:
                self.stage, self.name = before

        # A method, so that a deep copy's has the copy for its self.
        kind = InPlaceOf if is_own else _Keyed
        stand_in = MethodType(kind(function, noted), module) if is_method else kind(plain, partial(noted, module))
        return stand_in


class _Keyed(InPlaceOf):
    """What is put around the forward that a module with a key has from its class."""


def is_own(module: nn.Module) -> bool:
    """Whether the forward of a module is that of its class, but for what `KeyedCalls` puts around it."""
    forward = vars(module).get("forward")
    return forward is None or type(getattr(forward, "__func__", forward)) is _Keyed


class _Forward(NamedTuple):
    """A module's forward.

    Attributes:
        own: the instance's, which users may have replaced.
        noted: what is called instead.
    """

    module: nn.Module
    own: Any
    of_class: Any
    noted: Callable[..., Any]

    def is_current(self) -> bool:
        return vars(self.module).get("forward") is self.own and type(self.module).forward is self.of_class
