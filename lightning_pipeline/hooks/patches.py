"""Patches of torch while a hook runs, for calls that function modes do not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_pipeline import _torch
from lightning_pipeline.hooks.operands import TensorKeys
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, placeholder
from lightning_pipeline.partition.users_code import in_hook
from lightning_pipeline.recording.tensor_copies import copies_of_parameters_seen


@contextmanager
def parameters_seen(keys: TensorKeys) -> Iterator[None]:
    """While entered, modes see that parameters are copied or pickled, and new parameters get keys."""
    new = nn.Parameter.__dict__["__new__"].__func__

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        holders = holders_of(data) if in_hook.on and isinstance(data, Tensor) else None
        if holders is None:
            return new(cls, data, requires_grad)
        if type(data) is Placeholder:
            spec = data._pl_spec.but(requires_grad=requires_grad, is_leaf=True, is_parameter=True)
            return keys.note(placeholder(spec, data._pl_what), holders)
        with _torch.DisableTorchFunction():
            return keys.note(new(cls, data.detach(), requires_grad), holders)

    def is_seen(tensor: Tensor) -> bool:
        return in_hook.on and holders_of(tensor) is not None

    with overridden() as override, copies_of_parameters_seen(is_seen):
        override(nn.Parameter, "__new__", staticmethod(made))
        yield
