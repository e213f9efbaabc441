"""Copies and pickles of a strategy: they have the same options and are not set up.

Connections belong to this process, and stages to one module, so neither is copied.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

GIVEN_BY_TRAINER = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
"""Arguments that a Trainer sets if the user has not."""

Init = TypeVar("Init", bound=Callable[..., None])


def remembering(init: Init) -> Init:
    """An `__init__` that keeps its arguments for copies. (`__new__` would hide the signature from Lightning's CLI.)"""

    @functools.wraps(init)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in vars(self):  # or a derived class has set its own before
            self._arguments = args, kwargs
        init(self, *args, **kwargs)

    return cast(Init, remember)


def reduced(strategy: Any) -> tuple[Any, ...]:
    """For `__reduce__` of a class whose `__init__` is `remembering`."""
    # Not the properties' defaults, which would keep the next Trainer from setting them.
    own = {name: vars(strategy).get(f"_{name}", vars(strategy).get(name)) for name in GIVEN_BY_TRAINER}
    given = {name: _without_overrides(getattr(strategy, name)) for name, value in own.items() if value is not None}
    return _made_again, (type(strategy), strategy._arguments, given)


def _without_overrides(given: Any) -> Any:
    """An object that a Trainer has set, without the methods that a run has overridden on it."""
    overridden = [name for name in getattr(given, "__dict__", ()) if callable(getattr(type(given), name, None))]
    if not overridden:
        return given
    plain = copy.copy(given)
    for name in overridden:
        del vars(plain)[name]
    return plain


def _made_again(cls: type, arguments: tuple[Any, Any], given: dict[str, Any]) -> Any:
    args, kwargs = arguments
    made = cls(*args, **kwargs)
    for name, value in given.items():
        setattr(made, name, value)
    return made
