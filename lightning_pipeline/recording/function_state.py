"""What an autograd function of the user's uses of Python, beside tensors and numbers that it is given.

Its forward and backward run on one stage, later than the step's Python. So what they use must be what it was when the
step called them, and they must leave it alone::

    step    STRENGTH = 0.1    Reverse.apply(x)    STRENGTH = 0.2    Reverse.apply(x)
    stage                                                           forward, forward      both with 0.2: an error
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_pipeline.recording.operation import TakenAlong, is_atom
from lightning_pipeline.recording.reachable_state import Places, known_or_new, roots_of

_METHODS = ("forward", "backward", "setup_context")


class Use(TakenAlong):
    """What code uses at one time.

    Args:
        known: places of other code, to which this code's are added.
        code: classes, functions and methods.
        objects: what they are given, and what that is called.
    """

    __slots__ = ("_found", "_names", "_places")

    def __init__(
        self, known: OrderedDict[Any, Places], code: Sequence[Any], objects: Sequence[Any], names: Sequence[str]
    ) -> None:
        roots, _, key = roots_of((*code, *objects))
        classes = [one for one in code if isinstance(one, type)]
        key = ("use", *classes, key)
        if key in known and not known[key].lead_where_they_did():
            del known[key]

        def search() -> Places:
            return Places([*classes, *roots], dict(zip(map(id, objects), names, strict=True)), of_use=True)

        self._names = names
        self._places = known_or_new(known, key, search)
        self._found = self._places.now(objects)

    def __bool__(self) -> bool:
        return bool(self._found)

    def __repr__(self) -> str:  # by which those of two steps are compared
        return repr(self._found)

    def changed(self, objects: Sequence[Any]) -> str | None:
        """The name of what is another one now; None if nothing is."""
        return next(iter(self._places.changed(self._found, self._places.now(objects), self._names)), None)


def use_of(known: OrderedDict[Any, Places], cls: type, args: Sequence[Any]) -> Use | None:
    """What a function uses now, given these arguments; None if that is nothing but tensors and numbers."""
    objects = objects_in(args)
    names = [f"its argument {type(value).__name__}" for value in objects]
    if len(objects) > 1:
        names = [f"{name} ({place})" for place, name in enumerate(names)]
    return Use(known, (cls, *(getattr(cls, name) for name in _METHODS)), objects, names) or None


def objects_in(args: Iterable[Any]) -> list[Any]:
    """Objects among arguments, and containers that hold no tensors."""
    found = []
    for value in args:
        if isinstance(value, Tensor) or is_atom(value):
            continue
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
        if items is None:
            found.append(value)
        else:
            found += objects_in(items)
            if not any(isinstance(item, Tensor) for item in items):
                found.append(value)
    return found
