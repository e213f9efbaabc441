"""The attributes of objects, whether they are in a `__dict__` or in slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1024)
def slots_of(cls: type) -> tuple[str, ...]:
    """The attributes of a class's objects that are in slots."""
    names = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    found = (name for one in names for name in ((one,) if isinstance(one, str) else one))
    return tuple(name for name in found if name not in ("__weakref__", "__dict__"))


def attributes_of(value: Any) -> Mapping[str, Any] | None:
    """The attributes of an object by name; None if it has none that can be set."""
    found: Mapping[str, Any] | None = getattr(value, "__dict__", None)
    cls: Any = type(value)
    return Slots(value) if found is None and slots_of(cls) else found


USES_OF_DICT = (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__"),
    *("get", "keys", "values", "items", "pop", "popitem", "clear", "setdefault", "update", "copy"),
)
"""The methods by which a dictionary is used."""


def call_before(cls: type, methods: Iterable[str], function: Callable[[Any], None]) -> None:
    """Let methods that a class inherits call a function with their object first."""

    def calling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            function(self)
            return plain(self, *args, **kwargs)

        return run

    for name in methods:
        setattr(cls, name, calling(getattr(cls, name)))


class Slots(Mapping[str, Any]):
    """The attributes of an object with `__slots__`, as they are now."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._value, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        cls: Any = type(self._value)
        return (name for name in slots_of(cls) if hasattr(self._value, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)
