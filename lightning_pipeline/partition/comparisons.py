"""Comparisons of tensors that are on different ranks.

For ``a < b`` Python asks ``b.__gt__(a)`` first where the type of ``b`` is a subclass of that of ``a``, as that of
placeholders is of `Tensor`. So ranks come to different calls, depending on which operand they hold::

    rank 0 holds a    a < placeholder    ──►  gt(placeholder, a)
    rank 1 holds b    placeholder < b    ──►  lt(placeholder, b)
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

from torch import Tensor

_PAIRS = (("lt", "gt"), ("le", "ge"), ("eq", "eq"), ("ne", "ne"))
REFLECTED = {
    getattr(Tensor, spelling.format(one)): getattr(Tensor, spelling.format(other))
    for pair in _PAIRS
    for one, other in (pair, pair[::-1])
    for spelling in ("{}", "__{}__")
}
"""Comparisons, each with the one that gives the same with its operands exchanged."""


def unreflected(func: Any, args: Any, place: Callable[[Tensor], Any]) -> tuple[Any, Any]:
    """A comparison as all ranks call it, whichever of the two Python came to.

    Args:
        place: gives where an operand comes in the order of operands; alike on all ranks.
    """
    if len(args) == 2 and all(isinstance(one, Tensor) for one in args) and place(args[0]) > place(args[1]):
        return REFLECTED[func], args[::-1]
    return func, args


def is_never_equal(func: Any, args: Any) -> bool:
    """Whether a comparison is one with None, a string or the like, which Python answers by identity."""
    if func not in REFLECTED or len(args) != 2:
        return False
    return not all(isinstance(one, Tensor | Number) or hasattr(type(one), "__array__") for one in args)
