"""Work of the engine's own in the middle of the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from lightning_pipeline.partition.matcher import autocast_state


@contextmanager
def set_aside() -> Iterator[None]:
    """While entered, torch's state is what it was around the step: no modes, autograd on, no autocast."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    autocast = autocast_state()
    try:
        with ExitStack() as stack:
            for kind, _ in autocast or ():
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.set_grad_enabled(True))
            yield
    finally:
        while modes:
            torch._C._push_on_torch_function_stack(modes.pop())
