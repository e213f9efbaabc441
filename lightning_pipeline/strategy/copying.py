"""Copies of a strategy: they were asked for the same, and have not been set up.

Connections belong to this process, and its stages to one module, so neither goes into a copy or a pickle.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

GIVEN_BY_TRAINER = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
"""What a Trainer gives a strategy that was made without."""

Init = TypeVar("Init", bound=Callable[..., None])


def remembering(init: Init) -> Init:
    """An `__init__` that keeps its arguments for copies. (`__new__` would hide the signature from Lightning's CLI.)"""

    @functools.wraps(init)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in vars(self):  # of a class derived from the one whose `__init__` this is
            self._arguments = args, kwargs
        init(self, *args, **kwargs)

    return cast(Init, remember)


def reduced(strategy: Any) -> tuple[Any, ...]:
    """For `__reduce__` of a class whose `__init__` is `remembering`."""
    # What a Trainer has not given yet is not its properties' default: the next Trainer may give it.
    own = {name: vars(strategy).get(f"_{name}", vars(strategy).get(name)) for name in GIVEN_BY_TRAINER}
    given = {name: _without_overrides(getattr(strategy, name)) for name, value in own.items() if value is not None}
    return _made_again, (type(strategy), strategy._arguments, given)


def _without_overrides(given: Any) -> Any:
    """What a Trainer gave, without what stands for its methods in a run."""
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
