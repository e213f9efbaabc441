"""Modules compiled by ``torch.compile`` or ``module.compile()``.

Nothing of this package may run inside a compiled call, as the compiler would trace it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from lightning_pipeline.partition.overrides import called_when_imported, overridden

ORIGINAL = "_orig_mod"
"""The attribute of the compiler's wrapper that holds the module."""
_COMPILER = "torch._dynamo.eval_frame"
_IN_PLACE = "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module are compiled."""
    return is_wrapper(module) or vars(module).get(_IN_PLACE) is not None


def uncompiled(module: nn.Module) -> tuple[str, Any]:
    """An attribute of a compiled module, and the value of it with which calls run eagerly."""
    return ("forward", getattr(module, ORIGINAL)) if is_wrapper(module) else (_IN_PLACE, None)


def compiled_as_written(note: Callable[[], None] | None = None) -> AbstractContextManager[None]:
    """While entered, compiled functions and modules run eagerly, so that what they call is recorded.

    As `torch.compiler.set_stance("force_eager")`, but it does not import the compiler, and tells when it takes effect.

    Args:
        note: called for each compiled call.
    """

    def eager(callback: Any) -> None:
        if callback:
            _leave_uncounted()
            if note is not None:
                note()

    return _chosen_by(eager)


def compiled_as_asked() -> AbstractContextManager[None]:
    """While entered inside of `compiled_as_written`, compiled functions and modules run compiled again."""
    return _chosen_by(None)


def _leave_uncounted() -> None:
    """Where a call with fullgraph=True, which is an error if nothing was compiled, counts what was, stop the count."""
    count = getattr(sys.modules[_COMPILER], "set_fullgraph_compiled_frame_count", None)
    if count is not None:
        count(-1)


_Choice = Callable[[Any], None] | None
_choice: _Choice = None
"""What chooses at present; None for the compiler itself."""
_is_installed = False


@contextmanager
def _chosen_by(choice: _Choice) -> Iterator[None]:
    """While entered, `choice` chooses what the compiler does for a call; None for the compiler's own choice."""
    global _choice
    before, _choice = _choice, choice
    try:
        with nullcontext() if _is_installed else _installed():
            yield
    finally:
        _choice = before


@contextmanager
def _installed() -> Iterator[None]:
    """While entered, the compiler asks `_choice`, also where the user's code imports it meanwhile."""
    global _is_installed
    _is_installed = True

    def choose(compiler: Any) -> None:
        own = compiler._callback_from_stance
        override(compiler, "_callback_from_stance", lambda call: own(call) if _choice is None else _choice(call))

    try:
        with overridden() as override, called_when_imported((_COMPILER,), choose):
            yield
    finally:
        _is_installed = False


def is_original(name: str) -> bool:
    """Whether a name is that of a module inside of the compiler's wrapper, which is called in its place."""
    return name.rpartition(".")[2] == ORIGINAL


def plain_name(name: str) -> str:
    """A module's name as it is without compilation, the same for a wrapper and the module inside."""
    return ".".join(part for part in name.split(".") if part != ORIGINAL)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is the wrapper that torch.compile puts around another one."""
    # Importing the compiler takes a second. Whoever has compiled a module has imported it already.
    compiler = sys.modules.get(_COMPILER)
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
