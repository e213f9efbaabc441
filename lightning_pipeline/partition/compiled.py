"""Modules compiled by ``torch.compile`` or ``module.compile()``.

Nothing of this package is to be inside of a compiled call, as the compiler would follow it there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

ORIGINAL = "_orig_mod"
"""The attribute of a wrapper that is the module."""
_COMPILER = "torch._dynamo.eval_frame"
_IN_PLACE = "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of it are compiled."""
    return is_wrapper(module) or vars(module).get(_IN_PLACE) is not None


def uncompiled(module: nn.Module) -> tuple[str, Any]:
    """The attribute of a compiled module, and the value, with which calls run as they were written."""
    return ("forward", getattr(module, ORIGINAL)) if is_wrapper(module) else (_IN_PLACE, None)


@contextmanager
def compiled_as_written(note: Callable[[], None] | None = None) -> Iterator[None]:
    """While entered, compiled functions and modules run as they were written: what they compute is recorded.

    Args:
        note: is called when one does.
    """
    compiler: Any = sys.modules.get(_COMPILER)
    if compiler is None:
        yield
        return
    plain = compiler._callback_from_stance

    def callback_of(callback: Any) -> Any:
        if note is not None and callback:
            note()
        return None

    compiler._callback_from_stance = callback_of
    _as_asked.append(plain)
    try:
        yield
    finally:
        compiler._callback_from_stance = plain
        _as_asked.pop()


@contextmanager
def compiled_as_asked() -> Iterator[None]:
    """While entered, they run as they do without this."""
    compiler: Any = sys.modules.get(_COMPILER)
    if compiler is None or not _as_asked:
        yield
        return
    before, compiler._callback_from_stance = compiler._callback_from_stance, _as_asked[0]
    try:
        yield
    finally:
        compiler._callback_from_stance = before


_as_asked: list[Callable[[Any], Any]] = []


def is_original(name: str) -> bool:
    """Whether a name is that of a module inside of a compiler's wrapper, which is called instead of it."""
    return name.rpartition(".")[2] == ORIGINAL


def plain_name(name: str) -> str:
    """A module's name as it would be without compilation: the wrapper's and the wrapped module's are the same."""
    return ".".join(part for part in name.split(".") if part != ORIGINAL)


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is torch.compile's, around another one."""
    # Whoever has compiled a module has imported this; by itself it takes a second.
    compiler = sys.modules.get(_COMPILER)
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
