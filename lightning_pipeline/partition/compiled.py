"""Modules that ``torch.compile`` or ``module.compile()`` has compiled: what is inside of one is called as one.

Nothing of this package is to be inside of a compiled call, as the compiler would follow it there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_ORIGINAL = "_orig_mod"
_IN_PLACE = "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of it are compiled."""
    return _is_wrapper(module) or vars(module).get(_IN_PLACE) is not None


def entry_of(module: nn.Module) -> str:
    """The attribute through which calls of a module go."""
    return _IN_PLACE if vars(module).get(_IN_PLACE) is not None else "forward"


def uncompiled(module: nn.Module) -> tuple[str, Any]:
    """The attribute of a compiled module, and the value, with which calls run as they were written."""
    return ("forward", getattr(module, _ORIGINAL)) if _is_wrapper(module) else (_IN_PLACE, None)


@contextmanager
def compiled_as_written() -> Iterator[None]:
    """While entered, compiled functions and modules run as they were written: what they compute is recorded."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield
        return
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


def is_original(name: str) -> bool:
    """Whether a name is that of a module inside of a compiler's wrapper, which is called instead of it."""
    return name.rpartition(".")[2] == _ORIGINAL


def plain_name(name: str) -> str:
    """A module's name as it would be without compilation: the wrapper's and the wrapped module's are the same."""
    return ".".join(part for part in name.split(".") if part != _ORIGINAL)


def _is_wrapper(module: nn.Module) -> bool:
    # Whoever has compiled a module has imported this; by itself it takes a second.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
