"""Keep `state_dict` from taking tensors that are not here as if they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

_expected: ContextVar[bool] = ContextVar("_expected", default=False)


@contextmanager
def absent_state_expected() -> Iterator[None]:
    """While entered, state dicts may hold tensors on the meta device."""
    token = _expected.set(True)
    try:
        yield
    finally:
        _expected.reset(token)


def guard_state_dict(root: nn.Module) -> None:
    """Have `state_dict` of `root`, or of a module inside, raise where a tensor in it is on another stage."""
    for module in root.modules():
        if _has_absent(module) and _check not in module._state_dict_pre_hooks.values():
            module.register_state_dict_pre_hook(_check)


def unguard(module: nn.Module) -> None:
    """Take off of a module, not of those inside, what `guard_state_dict` has put on it."""
    for key, hook in list(module._state_dict_pre_hooks.items()):
        if hook is _check:
            del module._state_dict_pre_hooks[key]


def lift_guards(root: nn.Module) -> None:
    """Take them off where the tensors have come."""
    for module in root.modules():
        if not _has_absent(module):
            unguard(module)


def _has_absent(module: nn.Module) -> bool:
    return any(_is_absent(tensor) for tensor in (*module._parameters.values(), *module._buffers.values()))


def _check(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if _expected.get():
        return
    for slots in (module._parameters, module._buffers):
        for name, tensor in slots.items():
            if _is_absent(tensor) and name not in module._non_persistent_buffers_set:
                raise RuntimeError(
                    f"{prefix}{name} is on another stage, so state_dict() is not whole on this rank: write a "
                    f"checkpoint with trainer.save_checkpoint(path), or call trainer.strategy.gather_module() on all "
                    f"ranks, which gives rank 0 a module with all weights"
                )


def _is_absent(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_meta
